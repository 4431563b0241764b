"""COCO's pictures of standing people into WebDataset tars of square JPEGs, with their captions.

    python data_pipeline/01e_coco.py --path /mnt/coco --out data/fullbody
    python data_pipeline/01e_coco.py --url http://images.cocodataset.org --out data/fullbody --workers 4
    python data_pipeline/01e_coco.py --path /mnt/coco --out data/coco --min_height 0             # all with a person

--path holds annotations/captions_train2017.json and instances_train2017.json (or annotations_trainval2017.zip) and the
pictures in train2017/ or train2017.zip; from --url, zips/train2017.zip and annotations/annotations_trainval2017.zip are
got into <out>/raw. Zips are read where they lie. Taken are pictures in which a person's box (not a crowd) is at least
--min_height of the picture's height; the square is laid around the tallest one. The caption is one of COCO's five,
chosen by --seed and the picture's name.

Run the same command again to go on after a stop. What is left out is counted by reason.
"""

import json
from collections import defaultdict
from pathlib import Path

import _path  # noqa: F401

from sd.cli import parser
from sd.errors import InputError, run
from sd.files import make_folder
from sd.pictures import Reject
from sd.sources import add_arguments, build, check_arguments, choose, fetch, read_file
from sd.text import clean_text


def find(folder: Path, *names: str) -> Path:
    """The first of these that is there, or fails in one sentence."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise InputError(f"{folder} has none of {', '.join(names)}: give the folder of COCO as --path")


def read_annotations(path: Path, name: str) -> dict:
    """annotations/<name> from COCO's folder, or from the zip of annotations."""
    try:
        data = read_file(path, f"annotations/{name}" if path.is_file() else name)
        content = json.loads(data)
        if isinstance(content, dict) and all(isinstance(content[key], list) for key in ("images", "annotations")):
            return content
        found = f"a {type(content).__name__}"
    except (Reject, ValueError, KeyError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    raise InputError(f"{path} has no {name} of COCO with images and annotations ({found}): get it again")


def tallest_people(instances: dict) -> dict[int, tuple[float, tuple[float, float]]]:
    """By picture: height of the tallest person's box as a fraction of the picture's, and the box's middle (x, y)."""
    person = {row["id"] for row in instances.get("categories", []) if row["name"] == "person"} or {1}
    heights = {row["id"]: row["height"] for row in instances["images"]}
    tallest: dict[int, tuple[float, tuple[float, float]]] = {}
    for row in instances["annotations"]:
        if row["category_id"] not in person or row.get("iscrowd") or not heights.get(row["image_id"]):
            continue
        left, top, width, height = row["bbox"]
        found = height / heights[row["image_id"]], (left + width / 2, top + height / 2)
        tallest[row["image_id"]] = max(found, tallest.get(row["image_id"], (0.0, (0.0, 0.0))))
    return tallest


def make_items(captions: dict, instances: dict, min_height: float, seed: int, folder: str) -> list[tuple]:
    """(name, caption, about) of the pictures with a tall person, in the order of their names."""
    people = tallest_people(instances)
    texts = defaultdict(list)
    for row in captions["annotations"]:
        if isinstance(row.get("caption"), str):
            texts[row["image_id"]].append(" ".join(clean_text(row["caption"]).split()))
    items = []
    for row in sorted(captions["images"], key=lambda row: row["file_name"]):
        height, centre = people.get(row["id"], (-1.0, None))
        if height < min_height:
            continue
        choices = texts.get(row["id"])
        caption = choose(choices, seed, row["file_name"]) if choices else ""
        url = row.get("coco_url") or f"file:{row['file_name']}"
        items.append((folder + row["file_name"], caption,
                      {"url": url, "person_height": round(height, 4), "centre": centre}))  # fmt: skip
    return items


def main() -> None:
    p = parser(__doc__)
    add_arguments(p, "folder of COCO", "address of COCO, or of a copy", False, 1000)
    g = p.add_argument_group("of COCO")
    g.add_argument("--split", default="train2017", help="train2017 or val2017")
    g.add_argument("--min_height", type=float, default=0.55, help="of a person's box, in the picture's height")
    args = p.parse_args()
    check_arguments(args)
    if not 0 <= args.min_height <= 1:
        raise InputError("--min_height is a fraction from 0 to 1")
    if args.url:
        folder = make_folder(args.out / "raw")
        annotations, pictures = "annotations/annotations_trainval2017.zip", f"zips/{args.split}.zip"
        annotations, root = (fetch({"url": args.url}, name, folder) for name in (annotations, pictures))
    else:
        folder = Path(args.path)
        root = find(folder, args.split, f"{args.split}.zip")
        if (annotations := folder / "annotations" / f"captions_{args.split}.json").exists():
            annotations = annotations.parent
        else:
            annotations = find(folder, "annotations_trainval2017.zip", "annotations/annotations_trainval2017.zip")
    captions, instances = (
        read_annotations(annotations, f"{kind}_{args.split}.json") for kind in ("captions", "instances")
    )
    try:
        items = make_items(captions, instances, args.min_height, args.seed, f"{args.split}/" if root.is_file() else "")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the annotations in {annotations} are not as COCO's ({type(error).__name__}: {error}): get them again"
        ) from None
    if not items:
        raise InputError(f"no picture of {args.split} has a person as tall as --min_height {args.min_height}: lower it")
    build("01e_coco.py", args, root, items, {"split": args.split, "min_height": args.min_height})


if __name__ == "__main__":
    run(main)
