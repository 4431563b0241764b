"""Faces in folders of identities (VGGFace2's layout) into WebDataset tars of square JPEGs, with made captions.

    python data_pipeline/01d_faces.py --path /mnt/vggface2/train --out data/faces
    python data_pipeline/01d_faces.py --path faces.zip --out data/faces --about identity_meta.csv --per_identity 6

The pictures lie in one folder a person, n000002/0001_01.jpg, in a folder or a zip. A caption is one of TEMPLATES (or of
the lines of --templates), filled with `woman`, `man` or `person`; which one depends on --seed and the picture's name
alone. --about is VGGFace2's identity_meta.csv: Class_ID and Gender (m or f) are used, names of people never are.
--per_identity takes only so many pictures of each, chosen by the seed.

Run the same command again to go on after a stop. What is left out is counted by reason.
"""

import csv
import io
from collections import defaultdict
from pathlib import Path

import _path  # noqa: F401

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.shards import key_fraction
from sd.sources import add_arguments, build, check_arguments, choose, folder_of, list_pictures, root_of
from sd.text import check_template, clean_text

TEMPLATES = (
    "a photo of the face of a {person}",
    "a portrait of a {person}",
    "a close-up photo of a {person}",
    "a headshot of a {person}",
    "a {person} looking at the camera",
    "a photograph of a {person}'s face",
    "a portrait photo of a {person}, natural light",
    "a detailed photo of the face of a {person}",
)
PEOPLE = {"m": "man", "f": "woman"}


def read_templates(path: Path | None) -> list[str]:
    """Caption templates, one a line; TEMPLATES without a file."""
    if path is None:
        return list(TEMPLATES)
    lines = [line.strip() for line in usertext.user_lines(usertext.read_user_text(path)) if line.strip()]
    if not lines:
        raise InputError(f"{path} is empty: give one template a line, such as 'a portrait of a {{person}}'")
    for line in lines:
        check_template(line, ("person",))
    return lines


def read_people(path: Path | None) -> dict[str, str]:
    """woman or man by identity, from VGGFace2's identity_meta.csv (its fields have spaces around them)."""
    if path is None:
        return {}
    text = usertext.read_user_text(path)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True))
        header = [name.strip() for name in rows[0]]
        places = header.index("Class_ID"), header.index("Gender")
        wanted = max(places)
        pairs = [[row[place].strip() for place in places] for row in rows[1:] if len(row) > wanted]
    except (ValueError, IndexError, csv.Error) as error:
        raise InputError(f"cannot read {path} ({error}): give a .csv with the columns Class_ID and Gender") from None
    return {identity: PEOPLE[gender] for identity, gender in pairs if gender in PEOPLE}


def choose_pictures(names: list[str], per_identity: int | None, seed: int) -> list[str]:
    """At most so many pictures of each identity, those whose hash is lowest, in the order of their names."""
    if per_identity is None:
        return names
    by_identity = defaultdict(list)
    for name in names:
        by_identity[folder_of(name)].append(name)
    chosen = [
        sorted(group, key=lambda name: key_fraction(f"{seed}/{name}"))[:per_identity] for group in by_identity.values()
    ]
    return sorted(name for group in chosen for name in group)


def main() -> None:
    p = parser(__doc__)
    add_arguments(p, "folder or zip with a folder a person", "address of such a zip", False, 1000)
    g = p.add_argument_group("faces and their captions")
    g.add_argument("--about", type=Path, help="identity_meta.csv (default: none; everyone is a person)")
    g.add_argument("--templates", type=Path, help="file with one caption template a line; {person} is filled in "
                   "(default: TEMPLATES of this script)")  # fmt: skip
    g.add_argument("--per_identity", type=int, help="only so many pictures of each person (default: all)")
    args = p.parse_args()
    check_arguments(args)
    if args.per_identity is not None and args.per_identity < 1:
        raise InputError("--per_identity must be at least 1")
    templates, people = read_templates(args.templates), read_people(args.about)
    root = root_of(args)
    items = []
    for name in choose_pictures(list_pictures(root), args.per_identity, args.seed):
        identity = folder_of(name)
        person = people.get(identity, "person")
        caption = choose(templates, args.seed, name).format(person=person)
        items.append((name, caption, {"url": f"file:{clean_text(name)}", "identity": identity}))
    build("01d_faces.py", args, root, items, {"per_identity": args.per_identity})


if __name__ == "__main__":
    run(main)
