"""What a step sends that jdp did not make: a GPT in plain NNX, as Flax's sharding guide shards one, foreseen.

    python experiments/benchmarks/plain_nnx.py [--target h100:1x8] [--layers 12] [--json]

GPT-2 small (width 768, 12 heads, 50,304 tokens, 8 rows of 1024 tokens a device, float32, AdamW): every kernel and the
table of embeddings have `nnx.with_partitioning(init, (None, "data"))`, the state is made under `nnx.jit` with
`nnx.get_partition_spec`, and the step is `nnx.value_and_grad` under `nnx.jit`. "as written" says no word on where
activations lie; "constrained" shards them over `data` after the embedding and after each block. Both are compiled for
the target through `jdp.verify(step, ..., against="zero3")`; nothing runs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from measure import Row, finish, parser

import jdp
from jdp.base.formatting import format_bytes, format_seconds

WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 768, 12, 50304, 1024, 8
DEVICES = 8
ROWS_LIE = PartitionSpec("data")


def sharded(init: Any) -> Any:
    return nnx.with_partitioning(init, (None, "data"))


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = sharded(nnx.initializers.lecun_normal())
    return nnx.Linear(inputs, outputs, kernel_init=init, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH, rngs), linear(WIDTH, WIDTH, rngs)
        self.up, self.down = linear(WIDTH, 4 * WIDTH, rngs), linear(4 * WIDTH, WIDTH, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        heads = (part.reshape(*part.shape[:2], HEADS, WIDTH // HEADS) for part in qkv)
        x += self.out(jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, layers: int, constrained: bool, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=sharded(nnx.initializers.normal(0.02)), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.constrained = constrained

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.placed(self.embed(tokens))
        for block in self.blocks:
            x = self.placed(block(x))
        return self.embed.attend(self.norm(x))

    def placed(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, ROWS_LIE) if self.constrained else x


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer[Model], tokens: jax.Array) -> jax.Array:
    def loss_fn(model: Model) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def measure(target: str, layers: int, *, constrained: bool) -> dict[str, Any]:
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    @nnx.jit
    def create() -> tuple[Model, nnx.Optimizer[Model]]:
        model = Model(layers, constrained, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model, optimizer

    tokens = jax.ShapeDtypeStruct((ROWS * DEVICES, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, ROWS_LIE))
    with jax.set_mesh(mesh):
        model, optimizer = create()
        report = jdp.verify(train_step, model, optimizer, tokens, target=target, against="zero3", params="model")
    assert report.timeline is not None and report.ratio is not None
    return {
        "wire_bytes": report.wire_bytes_per_device,
        "ratio": report.ratio,
        "step_seconds": report.timeline.step_seconds,
        "most": report.sent[0].source or "an unknown line",
    }


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--target", default="h100:1x8", help="see jdp.foresight.targets")
    options.add_argument("--layers", type=int, default=12, metavar="N")
    given = options.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    forms = {"as written": False, "constrained": True}
    found = {name: measure(given.target, given.layers, constrained=value) for name, value in forms.items()}
    if not given.json:
        for name, one in found.items():
            words = f"{format_bytes(one['wire_bytes'])} a device, {one['ratio']:.2f} of zero3's row"
            print(f"{name:12} {words}; a step {format_seconds(one['step_seconds'])}; most by {one['most']}")
    sent = "; ".join(f"{name} {one['ratio']:.2f}" for name, one in found.items())
    row = Row(f"wire bytes of plain NNX steps over zero3's row, foreseen; GPT-2 small, fp32, {given.target}", sent, "–")
    finish({"target": given.target, "layers": given.layers, "forms": found}, given.json, row)


if __name__ == "__main__":
    main()
