"""What `jdp plan` says of models on H100s, by number of GPUs: recorded, and as a function that plans it anew."""

from pathlib import Path

from matplotlib.axes import Axes
from narration import show

from jdp.experiment.file import load
from jdp.experiment.plan import candidates_of
from jdp.foresight.foresee import make_plan_report
from jdp.foresight.targets.resolve import target_of

FILES = Path(__file__).parents[1]
HOSTS, FORESEEN = (1, 2, 8, 64), ("efficiency", "step, ms", "GiB a GPU")
WAYS = {  # experiment, sequences a GPU, strategy, whether each host of 8 GPUs is a replica
    "gpt2_124m, 2k tokens a GPU": ("gpt2_124m", 2, "zero1", False),
    "the same, a replica a host": ("gpt2_124m", 2, "zero1", True),
    "gpt2_124m, 16k tokens a GPU": ("gpt2_124m", 16, "zero1", False),
    "gpt_1b, 16k, 2 microbatches": ("gpt_1b", 8, "zero2", False),
}
FEW, REPLICAS, MANY, LARGE = WAYS
RECORDED = {  # `FORESEEN` on each of HOSTS; jax 0.10.2, 2026-11-27; `tests/lessons/test_scaling.py` plans them anew
    FEW: [(0.8515, 8.454, 1.339), (0.8099, 8.645, 1.252), (0.733, 9.595, 1.195), (0.5982, 11.49, 1.179)],
    REPLICAS: [(0.8507, 8.461, 1.339), (0.7061, 10.79, 1.348), (0.635, 12, 1.348), (0.5892, 12.93, 1.348)],
    MANY: [(0.9865, 39.78, 4.108), (0.9826, 39.74, 4.021), (0.9703, 40.07, 3.956), (0.895, 43.44, 4.442)],
    LARGE: [(0.9774, 263.1, 11.34), (0.9713, 262.7, 10.34), (0.9563, 265.2, 9.588), (0.841, 301.2, 9.367)],
}


def foreseen(way: str, hosts: int) -> tuple[float, float, float]:
    """Return `FORESEEN` of an experiment's step on `hosts` times 8 H100s, as `jdp plan` does."""
    file, sequences, strategy, replicas = WAYS[way]
    target, keys = target_of(f"h100:{hosts}x8"), {"train.batch_size": str(sequences * 8 * hosts)}
    keys |= {"model.bias": "true", "model.activation": "gelu"} if file == "gpt2_124m" else {}  # OpenAI's, as recorded
    experiment = load(FILES / f"{file}.toml", keys | ({"mesh.replica": str(hosts)} if replicas else {}))
    options = {"strategies": [strategy], "accumulate": [experiment.train.accumulate]}
    (found,) = make_plan_report(candidates_of(experiment, target, **options), target).estimates
    return found.efficiency, 1e3 * found.step_seconds, found.bytes_per_device / 2**30


def show_planned(planned: dict[str, list[tuple[float, float, float]]], axes: Axes) -> None:
    """Print a table of `FORESEEN` for each of WAYS on each of HOSTS, what it shows, and draw the efficiencies."""
    rows = [(way, 8 * n, *each) for way in planned for n, each in zip(HOSTS, planned[way], strict=True)]
    end, host = {way: each[-1][0] for way, each in planned.items()}, {way: each[0] for way, each in planned.items()}
    on_64 = planned[FEW][HOSTS.index(8)][2]
    said = (
        f"""At 16k tokens a GPU 512 GPUs are {end[MANY]:.0%} efficient, at 2k {end[FEW]:.0%}. A ring of 512 takes
            511 sends one after the other, whatever the bytes: jdp has all layers share one there, though nothing is
            computed meanwhile. With a replica on each host weights are gathered inside the host, and only gradients
            cross hosts: {end[REPLICAS]:.0%}. That is no gain here: a sum over hosts waits for the one inside.""",
        f"""Nine times the parameters at 16k tokens: {end[LARGE]:.0%} on 512 GPUs; on one host {host[LARGE][0]:.1%},
            the small model {host[MANY][0]:.1%}. FLOPs and bytes both grow with the parameters, so that is no gain;
            and its two microbatches each reduce their gradients (zero2).""",
        f"""Memory is not "the same as on one": a batch of 128 sequences takes {host[MANY][2]:.1f} GiB on each of 8
            GPUs and {on_64:.1f} on each of 64, as activations and optimizer state are divided.""",
    )
    show("H100s that are not there, by `jdp plan`", ("model", "H100s", *FORESEEN), rows, *said)
    for way, curve in planned.items():
        axes.semilogx([8 * n for n in HOSTS], [each[0] for each in curve], "o-", label=way)
    axes.set_xticks([8 * n for n in HOSTS], [str(8 * n) for n in HOSTS])
    axes.minorticks_off()
