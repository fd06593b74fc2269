"""`jdp plan`'s numbers for models on H100s, by number of GPUs: recorded, and a function that plans them again."""

from pathlib import Path

from matplotlib.axes import Axes
from narration import show

from jdp.experiment.file import load
from jdp.experiment.plan import candidates_of
from jdp.foresight.foresee import make_plan_report
from jdp.foresight.targets.resolve import target_of

FILES = Path(__file__).parents[1]
HOSTS, FORESEEN = (1, 2, 8, 64), ("efficiency", "step, ms", "GiB per GPU")
WAYS = {  # experiment, sequences a GPU, strategy, whether each host of 8 GPUs is a replica
    "gpt2_124m, 2k tokens per GPU": ("gpt2_124m", 2, "zero1", False),
    "the same, a replica per host": ("gpt2_124m", 2, "zero1", True),
    "gpt2_124m, 16k tokens per GPU": ("gpt2_124m", 16, "zero1", False),
    "gpt_1b, 16k, 2 microbatches": ("gpt_1b", 8, "zero2", False),
}
FEW, REPLICAS, MANY, LARGE = WAYS
RECORDED = {  # `FORESEEN` on each of HOSTS; jax 0.10.2, 2026-11-28; a test plans them again
    FEW: [(0.8605, 8.539, 1.339), (0.8188, 8.785, 1.252), (0.7302, 9.512, 1.195), (0.6651, 12.75, 1.946)],
    REPLICAS: [(0.8605, 8.539, 1.339), (0.7974, 9.556, 1.339), (0.6304, 11.8, 1.348), (0.5843, 12.73, 1.348)],
    MANY: [(0.9827, 39.87, 4.022), (0.9778, 39.91, 3.935), (0.9703, 40.02, 3.87), (0.9037, 44.65, 4.677)],
    LARGE: [(0.9724, 261.5, 13.36), (0.9683, 260.5, 12.25), (0.9616, 260.7, 11.42), (0.8852, 282.8, 11.18)],
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
    """Print a table of `FORESEEN` for each of WAYS on each of HOSTS, explain it, and draw the efficiencies."""
    rows = [(way, 8 * n, *each) for way in planned for n, each in zip(HOSTS, planned[way], strict=True)]
    end, host = {way: each[-1][0] for way, each in planned.items()}, {way: each[0] for way, each in planned.items()}
    on_64 = planned[FEW][HOSTS.index(8)][2]
    said = (
        f"""At 16k tokens per GPU 512 GPUs are {end[MANY]:.0%} efficient, at 2k {end[FEW]:.0%}. A ring of 512 takes 511
            sends one after the other for any size: jdp has all layers share one there, although nothing hides it. With
            a replica on each host weights are gathered inside the host, and only gradients cross hosts:
            {end[REPLICAS]:.0%}. That gains nothing here, because the sum over hosts waits for the sum inside each.""",
        f"""Nine times the parameters at 16k tokens: {end[LARGE]:.0%} on 512 GPUs; on one host {host[LARGE][0]:.1%}, the
            small model {host[MANY][0]:.1%}. FLOPs and bytes both grow with the parameters, so size gains nothing; and
            its two microbatches each reduce their gradients (zero2).""",
        f"""Memory is not "the same as on one": a batch of 128 sequences takes {host[MANY][2]:.1f} GiB on each of 8 GPUs
            and {on_64:.1f} on each of 64, because activations and optimizer state are divided.""",
    )
    show("Planned for H100s by `jdp plan`, without a GPU", ("model", "H100s", *FORESEEN), rows, *said)
    for way, curve in planned.items():
        axes.semilogx([8 * n for n in HOSTS], [each[0] for each in curve], "o-", label=way)
    axes.set_xticks([8 * n for n in HOSTS], [str(8 * n) for n in HOSTS])
    axes.minorticks_off()
