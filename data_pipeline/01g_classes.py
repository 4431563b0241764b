"""A folder a class (ImageNet's layout) into WebDataset tars of square JPEGs, with captions from the classes.

    python data_pipeline/01g_classes.py --path imagenet/train --classes imagenet_class_index.json --out data/imagenet
    python data_pipeline/01g_classes.py --path pictures.zip --classes prompts.json --template "{name}" --out data/mine

The pictures lie in one folder a class, n01440764/n01440764_10026.JPEG, in a folder or a zip. --classes is a JSON file:
{"n01440764": "tench"}, or lists of names, of which one is chosen by --seed and the picture's name, or ImageNet's
{"0": ["n01440764", "tench"]}; underscores become spaces. --template makes the caption of {name}. A picture whose folder
is no key of it is left out as no_caption.

Run the same command again to go on after a stop. What is left out is counted by reason.
"""

import json
import re
from pathlib import Path

import _path  # noqa: F401

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.sources import add_arguments, build, check_arguments, choose, folder_of, list_pictures, root_of
from sd.text import check_template, clean_text


def read_classes(path: Path) -> dict[str, list[str]]:
    """Names by folder, or fails in one sentence."""
    try:
        content = json.loads(usertext.read_user_text(path))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {path} as JSON ({error}): give an object such as {{'n01440764': 'tench'}}"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold a JSON object but holds {usertext.shown(content)}: give names by folder")
    classes = {}
    for row, (key, value) in enumerate(content.items(), 1):
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n.strip() for n in names):
            raise InputError(
                f"{path}, row {row}, gives {key!r} the value {usertext.shown(value)}: give a name, or names"
            )
        if key.isdigit() and len(names) == 2 and re.fullmatch(r"n\d{8}", names[0]):
            key, names = names[0], names[1:]
        classes[key] = [clean_text(name).replace("_", " ").strip() for name in names]
    if not classes:
        raise InputError(f"{path} names no class: give an object such as {{'n01440764': 'tench'}}")
    return classes


def main() -> None:
    p = parser(__doc__)
    add_arguments(p, "folder or zip with a folder a class", "address of such a zip", False, 1000)
    g = p.add_argument_group("captions")
    g.add_argument("--classes", required=True, type=Path, help="JSON with the names of each class")
    g.add_argument("--template", default="a photo of a {name}", help="what the name is put into")
    args = p.parse_args()
    check_arguments(args)
    check_template(args.template, ("name",))
    classes = read_classes(args.classes)
    root = root_of(args)
    items = []
    for name in list_pictures(root):
        folder = folder_of(name)
        names = classes.get(folder)
        caption = args.template.format(name=choose(names, args.seed, name)) if names else ""
        items.append((name, caption, {"url": f"file:{clean_text(name)}", "class": folder}))
    if not any(caption for _, caption, _ in items):
        raise InputError(
            f"none of the folders in {root} is a key of {args.classes}: its keys must be the folders' names"
        )
    build("01g_classes.py", args, root, items, {"template": args.template})


if __name__ == "__main__":
    run(main)
