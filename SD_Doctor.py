"""Says why a training fails: looks at a run, a checkpoint or any SD 1.x model, and changes nothing.

    python SD_Doctor.py runs/1_broad                                 # what logs, data and weights tell, in seconds
    python SD_Doctor.py runs/1_broad --deep --out doctor.html        # also runs the network, and paints
    python SD_Doctor.py model.safetensors --json verdicts.json       # a model alone, from elsewhere
    python SD_Doctor.py model.safetensors --deep --dataset data/x/dataset --latents data/x/latents

Each verdict is 'well', 'look here' or 'broken', with what was measured, how often the rule accuses healthy runs
(docs/DOCTOR.md says how that was counted), and what to do. A rule that lacks what it judges by says so.
"""

import json
from pathlib import Path

from sd.cli import parser
from sd.device import pick_device
from sd.diagnosis.case import open_case
from sd.diagnosis.course import check_course
from sd.diagnosis.data import check_data
from sd.diagnosis.findings import as_page, as_rows, in_lines
from sd.diagnosis.network import check_model
from sd.diagnosis.painted import check_painting
from sd.diagnosis.probing import check_network
from sd.errors import InputError, run
from sd.files import atomic_write
from sd.samplers import SAMPLERS

OF_DATA = ("data_root", "data", "dataset", "latents", "size")


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("what to look at")
    g.add_argument("SOURCE", help="run folder, checkpoint, or any SD 1.x file or folder")
    g.add_argument("--deep", action="store_true", help="run the network too, and paint: seconds for a small one, "
                   "minutes "
                   "on a GPU for the full one")  # fmt: skip
    g.add_argument("--data_root", help="where the sources lie (default: where the run found them)")
    g.add_argument("--data", help="sources below it (default: the run's)")
    g.add_argument("--dataset", help="one dataset folder (default: the run's)")
    g.add_argument("--latents", help="and its latents (default: the run's)")
    g.add_argument("--size", type=int, help="pixels a side (default: the run's)")
    g.add_argument("--vae", help="VAE to check the latents with (default: the one they name)")
    g.add_argument("--text_encoder", help="text encoder to check the ids with (default: the model's)")

    g = p.add_argument_group("how you paint, which --deep judges")
    g.add_argument("--sampler", choices=list(SAMPLERS), default="ddim", help="sampler")
    g.add_argument("--steps", type=int, default=30, help="its steps")
    g.add_argument("--cfg", type=float, help="guidance (default: the run's --sample_cfg, or 7.5)")
    g.add_argument("--device", help="cuda, mps or cpu (default: the best there is)")

    g = p.add_argument_group("what to write")
    g.add_argument("--out", metavar="PAGE.html", help="the report as a page (default: none)")
    g.add_argument("--json", metavar="FILE", help="the report for programs, a list; in a run's folder, under the name "
                   "doctor.json, it is on the run's page too (default: none)")  # fmt: skip
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    if not 1 <= args.steps <= 1000:
        raise InputError(f"--steps wants 1 to 1000, found {args.steps}")
    if (args.dataset is None) != (args.latents is None):
        raise InputError("--dataset and --latents name one source together: give both")
    for name in ("out", "json"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise InputError(f"--{name} wants a file in a folder that is there, found {path}")
    case = open_case(args.SOURCE, {name: getattr(args, name) for name in OF_DATA})
    case.vae_name, case.text_name, case.device = args.vae, args.text_encoder, pick_device(args.device)
    found = check_data(case, args.deep) + check_model(case, args.deep) + check_course(case)
    if args.deep:
        cfg = case.settings.get("sample_cfg", 7.5) if args.cfg is None else args.cfg
        found += check_network(case) + check_painting(case, args.sampler, args.steps, cfg)
    title = f"SD_Doctor on {args.SOURCE}"
    print(in_lines(title, found))
    if args.json:
        atomic_write(Path(args.json), json.dumps(as_rows(found), indent=1))
    if args.out:
        atomic_write(Path(args.out), as_page(title, found))


if __name__ == "__main__":
    run(main)
