"""The GRU of `cells/gru.py`, reset before the product, on Hopper GPUs: one kernel for all steps.

A scan launches several kernels per step and reads U from memory each time. Here ONE kernel runs all
T steps, and U stays in shared memory. A warpgroup computes 64 hidden units of 64 rows of the batch:
it holds the columns of U for these units, and their state and gates in registers.

    step:  r = σ(a_r + h·Ur)              publish r ⊙ h
           z = σ(a_z + h·Uz)              (while r ⊙ h travels)
           n = tanh(a_n + (r ⊙ h)·Un)
           h' = (1 − z) ⊙ h + z ⊙ n       publish h'

A product needs all H units, so the warpgroups publish their results twice per step. In a single
thread block (H ≤ 128) they write them to the block's shared memory. For a larger H, a cluster of
H/64 blocks writes them to global memory, which is cached in L2, and reads them back 64 units at a
time: at H = 512, U fills 192 of a block's 227 KB, which leaves no room for a whole h (64 KB). The
order is that of Mosaic's collective matmul: a block waits for its own copy to global memory and
arrives at the barrier; after the barrier, the blocks copy the data in, by the same engine.
Loads from global memory and stores to it are issued before a wait and overlap with it.

State, gates and sums are float32. The operands of products are rounded to bfloat16, as in
`cells.products.dot` if U is bfloat16; if U is float32, this is the only difference.
After Diamos et al. 2016, "Persistent RNNs: Stashing Recurrent Weights On-Chip".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.nn import sigmoid
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float

from jaxgru.cells.base import Mask, Recurrent
from jaxgru.cells.gru import RESET_BEFORE
from jaxgru.cells.over_time import before
from jaxgru.cells.products import outer

BLOCK = 64  # rows and units of a warpgroup: the M of wgmma, and 128 bytes of bfloat16, one swizzle
SLOTS = 4  # tiles in flight from global memory; what fits beside U at H = 512
MAX_CLUSTER = 8  # blocks that every Hopper GPU can place in a cluster
SHARED_BYTES = 227 * 1024 - 1024  # per block, minus the barriers
Z, R, N = range(3)  # the order of the gates in a and in U
# JAX imports ACC into this module without declaring it public
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
FENCED = False
"""Whether a cluster's thread blocks exchange values with fences around their barrier. Mosaic's
arrive and wait order memory within a thread block, by the letter of the PTX ISA. Between blocks all
goes through L2 and a copy is complete before its block arrives, so this should suffice; if errors
differ between equal runs on a GPU, set this first."""


def clusters(H: int) -> list[int]:
    """Return the possible numbers of thread blocks in a cluster: one, or one per 64 units."""
    sizes = {1, H // BLOCK} if H > 0 and H % BLOCK == 0 else {}
    return sorted(C for C in sizes if C <= MAX_CLUSTER and _shared_bytes(H, C) <= SHARED_BYTES)


def _shared_bytes(H: int, cluster: int) -> int:
    """Return the shared memory of a thread block: its columns of Uz, Ur and Un, and its tiles.

    H = 128 in 1 block: 3 · 128 · 128 · 2 bytes and 8 tiles, 160 KB; H = 192 would need 312.
    H = 512 in 8 blocks: 3 · 512 · 64 · 2 bytes and 4 tiles, 224 KB.
    """
    U = 3 * (H // BLOCK) ** 2 // cluster
    return (U + _tiles(H, cluster, kinds=4)) * BLOCK * BLOCK * 2


def _tiles(H: int, cluster: int, kinds: int) -> int:
    """Return the number of (64, 64) tiles beside U: all published values, or those in flight."""
    return kinds * H // BLOCK if cluster == 1 else SLOTS


def supports(B: int, H: int, dtype: DTypeLike = jnp.float32, device: Any = None) -> bool:
    """Return whether the kernel can run.

    Args:
      B: rows: any number, padded to a multiple of 64.
      H: units: 64, 128 or a larger multiple of 64 up to 512.
      dtype: of the state and of a; U can be float32 or bfloat16.
      device: the JAX device to run on; None: the default. Only Hopper has wgmma.
    """
    device = device or jax.devices()[0]
    hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    return hopper and B > 0 and jnp.dtype(dtype) == jnp.float32 and bool(clusters(H))


class _Warpgroup(NamedTuple):
    """The operations of a warpgroup. Values are (64, 64): its own rows and units.

    Events 0 and 1 alternate: a warpgroup that has waited for one knows that all others have passed
    the other.
    """

    read: Callable[..., Array]
    """read(x, t, part): its block of x at step t; `part` chooses z, r or n if x has several."""
    write: Callable[..., None]
    """write(x, t, value, part): write to the same place of an output."""
    publish: Callable[..., None]
    """publish(event, (kind, value), …): send values, as bfloat16, to all warpgroups of its rows."""
    wait: Callable[[int], None]
    """wait(event): wait until all of them have published for this event."""
    fetch: Callable[[Any], None]
    """fetch(kind): start to copy published values to shared memory, for the next product."""
    product: Callable[..., Array]
    """product(kind, gate, plus): multiply the fetched values by its own columns of the gate's U;
    return `plus` and this product. Sums are float32."""


def _run(
    body: Callable[[_Warpgroup, Array, Sequence[Any], Sequence[Any]], Array],
    U: Float[Array, "_ _ 64"],
    state: Float[Array, "B H"],
    inputs: Sequence[Float[Array, "T B _"]],
    outputs: Sequence[int],
    kinds: int,
    cluster: int | None,
    interpret: Any,
    fenced: bool,
) -> tuple[Array, ...]:
    """Run `body` in every warpgroup: the code that the forward and the backward pass share.

    Args:
      body: (operations, block of the state, references to the inputs, references to the outputs) →
        block of the state after the last step, for one warpgroup.
      U: (H / 64, 3·H, 64): for each 64 units, their columns of the gates' U, stacked.
      state: the state before the first step.
      inputs: arrays over time, with H units or a multiple.
      outputs: the width of each output, in multiples of H.
      kinds: how many kinds of values are published; each has its own space.
      cluster: the number of thread blocks that share H, one of `clusters(H)`; None: the fewest.
      interpret: False, or parameters of Mosaic GPU's interpreter.
      fenced: whether the thread blocks' exchange has fences; see `FENCED`.

    Returns:
      The outputs (T, B, _), then the state after the last step.
    """
    (T, B), H = inputs[0].shape[:2], state.shape[-1]
    C = cluster or min(clusters(H), default=0)
    if C not in clusters(H):
        raise ValueError(f"H is {H}, in {C} thread blocks; there is a kernel for {clusters(H)}.")
    fence: Any = _fence if fenced and C > 1 and not interpret else lambda: None
    rows, blocks = -(-B // BLOCK), H // BLOCK
    warpgroups = blocks // C  # in a thread block
    tile = (BLOCK, BLOCK)
    alone = C == 1

    def kernel(*refs, weights, tiles, weights_loaded, loaded, published):
        U_ref, num_tiles, state_in, *refs = refs
        num_tiles = num_tiles[0]
        ins, outs = refs[: len(inputs)], refs[len(inputs) :]
        state_out, exchange = outs[len(outputs)], outs[-1]  # a single block has no exchange
        row, mine = lax.axis_index("row"), lax.axis_index("warpgroup")
        block = lax.axis_index("cluster") * warpgroups + mine

        def read(x, t, part=0):
            x = x.at[t, row, :, part, block, :]
            return x[...] if interpret else load(x)

        def write(x, t, value, part=0):
            x[t, row, :, part, block, :] = value

        def place(kind, i):
            return kind * blocks + i if alone else (row * kinds + kind) * blocks + i

        def publish(event, *pairs):
            places = [place(kind, block) for kind, _ in pairs]
            slots = places if alone else range(SLOTS - len(pairs), SLOTS)
            for slot, (_, value) in zip(slots, pairs, strict=True):
                tiles[slot] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            if not alone:
                for slot, to in zip(slots, places, strict=True):
                    plgpu.copy_smem_to_gmem(tiles.at[slot], exchange.at[to])
                plgpu.wait_smem_to_gmem(0)
                fence()
            plgpu.barrier_arrive(published.at[event])

        def wait(event):
            plgpu.barrier_wait(published.at[event])
            fence()

        def fetch_tile(kind, i):
            slot = i % SLOTS
            plgpu.copy_gmem_to_smem(exchange.at[place(kind, i)], tiles.at[slot], loaded.at[slot])

        def fetch(kind):
            # The last slot stays free for what is published meanwhile
            for i in range(0 if alone else min(SLOTS - 1, blocks)):
                fetch_tile(kind, i)

        def product(kind, gate, plus):
            def multiply(acc):
                @pl.loop(0, num_tiles)
                def _(i):
                    slot = place(kind, i) if alone else i % SLOTS
                    if not alone:
                        plgpu.barrier_wait(loaded.at[slot])
                    U_rows = pl.ds((gate * blocks + i) * BLOCK, BLOCK)
                    plgpu.wgmma(acc, tiles.at[slot], weights.at[mine, U_rows])
                    if not alone:
                        plgpu.wgmma_wait(1)  # the previous product no longer needs its slot
                        pl.when(i + SLOTS - 1 < blocks)(lambda: fetch_tile(kind, i + SLOTS - 1))

            if not interpret:
                return pl.run_state(multiply)(ACC.init(plus))

            def from_zeros(acc):
                multiply(acc)
                return acc[...]

            return plus + pl.run_scoped(from_zeros, ACC(tile))  # all that the interpreter has

        for i in range(3 * blocks):  # one tile at a time, like all other copies
            U_rows = pl.ds(i * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(
                U_ref.at[block, U_rows], weights.at[mine, U_rows], weights_loaded
            )
        plgpu.barrier_wait(weights_loaded)
        means = _Warpgroup(read, write, publish, wait, fetch, product)
        write(state_out, 0, body(means, read(state_in, 0), ins, outs[: len(outputs)]))

    def split(x):
        """Reshape (T, B, k·H) to (T, rows, 64, k, blocks, 64), to index a warpgroup's block."""
        x = jnp.pad(x, [(0, 0), (0, rows * BLOCK - B), (0, 0)])
        return x.reshape(len(x), rows, BLOCK, -1, blocks, BLOCK)

    def joined(x):
        return x.reshape(len(x), rows * BLOCK, -1)[:, :B]

    # In memory, so that the compiler does not know it: it would unroll the loop over a product's
    # tiles, and keep their addresses in registers that all else needs
    num_tiles = jnp.full(1, blocks, jnp.int32)
    shapes = [(T, rows, BLOCK, k, blocks, BLOCK) for k in outputs]
    shapes.append((1, rows, BLOCK, 1, blocks, BLOCK))
    out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    if alone:
        events = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2)
    else:
        events = plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2)
        out_type.append(jax.ShapeDtypeStruct((rows * kinds * blocks, *tile), jnp.bfloat16))
    swizzled = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK))
    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=dict(
            weights=plgpu.SMEM((warpgroups, 3 * H, BLOCK), jnp.bfloat16, transforms=swizzled),
            tiles=plgpu.SMEM((_tiles(H, C, kinds), *tile), jnp.bfloat16, transforms=swizzled),
            weights_loaded=plgpu.Barrier(num_arrivals=warpgroups * 3 * blocks),
            loaded=plgpu.Barrier(num_barriers=SLOTS),
            published=events,
        ),
        grid=(rows,),
        grid_names=("row",),
        cluster=(C,),
        cluster_names=("cluster",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=body.__name__,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup  # the default from JAX 0.11 on
        ),
    )(U.astype(jnp.bfloat16), num_tiles, *map(split, (state[None], *inputs)))
    *series, last = map(joined, results[: len(shapes)])
    return *series, last[0]


# Loads from global memory to a warpgroup's registers; before JAX 0.11 the index was an argument.
load: Callable[..., Array] = partial(plgpu.load, optimized=False)
if jax.__version_info__ < (0, 11):
    load = partial(load, idx=None)


@plgpu.inline_mgpu()
def _fence(_: Any) -> None:
    """Order what this thread did and what it does next, as the whole cluster sees it."""
    nothing, text = ir.Type.parse("!llvm.void"), "fence.acq_rel.cluster;"
    llvm.inline_asm(nothing, [], text, "~{memory}", has_side_effects=True)


def _columns(*U: Float[Array, "H H"]) -> Float[Array, "_ _ 64"]:
    """Return, for each 64 units, their columns of all matrices, stacked: (H / 64, k·H, 64)."""
    stacked = jnp.concatenate(U)
    return stacked.reshape(len(stacked), -1, BLOCK).swapaxes(0, 1)


def scaled(mask: Mask | None) -> list[Array]:
    """Return the float32 factor of h' in a list, which is empty without a mask."""
    return [] if mask is None else [jnp.where(mask.keep, mask.scale.astype(jnp.float32), 0)]


def gru_forward(
    Uzr: Float[Array, "H 2*H"],
    Un: Float[Array, "H H"],
    h0: Float[Array, "B H"],
    a: Float[Array, "T B 3*H"],
    mask: Mask | None,
    *,
    cluster: int | None = None,
    interpret: Any = False,
    fenced: bool = FENCED,
) -> tuple[Float[Array, "T B H"], Float[Array, "T B 2*H"], Float[Array, "T B H"]]:
    """Return the (masked) state after each step, and z, r and n of each step."""
    T = len(a)
    # Kinds 0 and 1 are h of even and odd steps: a fast warpgroup may publish h' while a slow one
    # still multiplies h by Uz.
    RH = 2

    def gru_forward_steps(do, h, inputs, outputs):
        (a, *scale), (h_out, zr_out, n_out) = inputs, outputs

        def step(t, h):
            a_r = do.read(a, t, part=R)
            do.wait(0)
            do.fetch(t % 2)
            r = sigmoid(do.product(t % 2, R, a_r))
            do.fetch(t % 2)
            a_z = do.read(a, t, part=Z)
            do.publish(1, (RH, r * h))
            do.write(zr_out, t, r, part=R)
            z = sigmoid(do.product(t % 2, Z, a_z))
            do.write(zr_out, t, z, part=Z)
            a_n, scale_t = do.read(a, t, part=N), [do.read(x, t) for x in scale]
            do.wait(1)
            do.fetch(RH)
            n = jnp.tanh(do.product(RH, N, a_n))
            h = (1 - z) * h + z * n
            for x in scale_t:
                h = h * x
            do.publish(0, ((t + 1) % 2, h))
            do.write(n_out, t, n)
            do.write(h_out, t, h)
            return h

        do.publish(0, (0, h))
        h = lax.fori_loop(0, T, step, h)
        do.wait(0)  # a block may not end before the others have arrived at its barrier
        return h

    U = _columns(*jnp.split(Uzr, 2, axis=1), Un)
    h, zr, n, _ = _run(
        gru_forward_steps, U, h0, [a, *scaled(mask)], (1, 2, 1), 3, cluster, interpret, fenced
    )
    return h, zr, n


def gru_backward(
    Uzr: Float[Array, "H 2*H"],
    Un: Float[Array, "H H"],
    h_before: Float[Array, "T B H"],
    zr: Float[Array, "T B 2*H"],
    n: Float[Array, "T B H"],
    mask: Mask | None,
    dh_out: Float[Array, "T B H"],
    *,
    cluster: int | None = None,
    interpret: Any = False,
    fenced: bool = FENCED,
) -> tuple[Float[Array, "B H"], Float[Array, "T B 3*H"]]:
    """Return the gradients of h0 and a, as the backward scan of `cells.gru.RESET_BEFORE`."""
    T = len(n)
    DA_N, DA_R, DA_Z = range(3)  # and 3: da_z of odd steps, for the same reason as h above

    def gru_backward_steps(do, dh, inputs, outputs):
        (dh_out, h_before, zr, n_in, *scale), (da,) = inputs, outputs

        def read(t):
            """Read what step t begins with: its part of the loss's gradient, the mask, z, n, h."""
            z, n, h = do.read(zr, t, part=Z), do.read(n_in, t), do.read(h_before, t)
            return do.read(dh_out, t), [do.read(x, t) for x in scale], z, n, h

        def step(i, loop):
            t = T - 1 - i
            dh, (scale_t, z, n, h) = loop
            for x in scale_t:
                dh = dh * x
            da_n = dh * z * (1 - n * n)
            da_z = dh * (n - h) * z * (1 - z)
            do.publish(0, (DA_N, da_n), (DA_Z + t % 2, da_z))
            do.write(da, t, da_n, part=N)
            do.write(da, t, da_z, part=Z)
            r = do.read(zr, t, part=R)
            do.wait(0)
            do.fetch(DA_N)
            d_rh = do.product(DA_N, N, jnp.zeros_like(dh))
            do.fetch(DA_Z + t % 2)
            da_r = d_rh * h * r * (1 - r)
            do.publish(1, (DA_R, da_r))
            do.write(da, t, da_r, part=R)
            dh = do.product(DA_Z + t % 2, Z, dh * (1 - z) + d_rh * r)
            from_loss, *before = read(jnp.maximum(t - 1, 0))
            dh = dh + from_loss * jnp.minimum(t, 1).astype(jnp.float32)  # h0 is not in the loss
            do.wait(1)
            do.fetch(DA_R)
            return do.product(DA_R, R, dh), before

        from_loss, *last = read(T - 1)
        return lax.fori_loop(0, T, step, (dh + from_loss, last))[0]

    U = _columns(*(U.T for U in (*jnp.split(Uzr, 2, axis=1), Un)))
    series = [dh_out, h_before, zr, n, *scaled(mask)]
    start = jnp.zeros_like(n[0])
    da, dh0 = _run(gru_backward_steps, U, start, series, (3,), 4, cluster, interpret, fenced)
    return dh0, da


def differentiable(
    forward: Callable[..., tuple[Array, Array, Array]],
    backward: Callable[..., tuple[Array, Array]],
) -> Callable[..., Any]:
    """Return (Uzr, Un, h0, a, mask) → h of every step, with its gradient, from two kernels.

    Args:
      forward: a function like `gru_forward`.
      backward: a function like `gru_backward`.
    """

    def with_residuals(Uzr, Un, h0, a, mask):
        h, zr, n = forward(Uzr, Un, h0, a, mask)
        return h, (Uzr, Un, h0, h, zr, n, mask)

    def gradients(residuals, dh_out):
        Uzr, Un, h0, h, zr, n, mask = residuals
        H = h0.shape[-1]
        h_before = before(h0, h)
        dh0, da = backward(Uzr, Un, h_before, zr, n, mask, dh_out)
        dUzr = outer(h_before, da[..., : 2 * H], Uzr.dtype)
        dUn = outer(zr[..., H:] * h_before, da[..., 2 * H :], Un.dtype)
        return dUzr, dUn, dh0, da, None

    gru = jax.custom_vjp(lambda *arguments: with_residuals(*arguments)[0])
    gru.defvjp(with_residuals, gradients)
    return gru


def gru(
    Uzr: Float[Array, "H 2*H"],
    Un: Float[Array, "H H"],
    h0: Float[Array, "B H"],
    a: Float[Array, "T B 3*H"],
    mask: Mask | None,
    cluster: int | None = None,
    interpret: Any = False,
    fenced: bool = FENCED,
) -> Float[Array, "T B H"]:
    """Compute h of every step by `RESET_BEFORE`, and its gradient, if `supports` allows it."""
    options: Any = dict(cluster=cluster, interpret=interpret, fenced=fenced)
    passes = partial(gru_forward, **options), partial(gru_backward, **options)
    return differentiable(*passes)(Uzr, Un, h0, a, mask)


def supports_layer(layer: Recurrent, h0: Float[Array, "B H"]) -> bool:
    """Return whether the kernel can compute the layer: its weights must be bfloat16."""
    (B, H), narrow = h0.shape, layer.U[0].dtype == jnp.bfloat16
    return layer.recurrence is RESET_BEFORE and narrow and supports(B, H, h0.dtype)


def over_time(layer: Recurrent, h0: Array, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    """Compute `cells.over_time.over_time` for a layer that `supports_layer` accepts."""
    h = gru(layer.U[0], layer.U[1], h0, a, mask)
    return h, h[-1]
