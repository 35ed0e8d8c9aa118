"""The GRU of `gru_hopper.py` on more of the GPU: each cluster of thread blocks has 16 rows.

There, a cluster computes 64 rows of the batch, the least that wgmma multiplies from the left: a
batch of 64 rows occupies 8 of an H200's 132 multiprocessors. Here, the product is transposed: U is
on the left, with 64 hidden units, and 16 rows of the batch are on the right. So 4 clusters share
the batch, and less is computed one after another in each. A block, one warpgroup, has 64 units:

    step:  r = σ(a_r + Ur·h)              send r ⊙ h
           z = σ(a_z + Uz·h)              (while r ⊙ h travels)
           n = tanh(a_n + Un·(r ⊙ h))
           h' = (1 − z) ⊙ h + z ⊙ n       send h'

Every block has a whole h and a whole r ⊙ h in shared memory. To send is to copy its 64 units into
the memory of the other blocks of its cluster, by the engine of TMA: nothing goes through L2. At
H = 512, a block has 227 KB for

    its columns of Uz, Ur and Un    3 · 512 · 64 · 2 bytes    192 KB
    two buffers: h and r ⊙ h        2 · 512 · 16 · 2 bytes     32 KB
    barriers, aligned                                           1 KB

The memory has no third buffer, so a buffer is filled again in each step. Each has two barriers:
`full` counts the bytes that arrive; `free` counts the blocks that have multiplied what it held, and
a block sends only when all have. What a step reads from global memory is requested one step ahead.

State, gates and sums are float32; the operands of products are rounded to bfloat16, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.nn import sigmoid
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float

from jaxgru.cells.base import Mask, Recurrent
from jaxgru.kernels.gru_hopper import (
    ACC,
    BLOCK,
    MAX_CLUSTER,
    N,
    R,
    Z,
    differentiable,
    load,
    scaled,
)

BATCH_TILE = 16  # of a cluster: the N of wgmma, and 32 bytes of bfloat16, the narrowest swizzle
TILE = BLOCK, BATCH_TILE  # what a block computes and sends
BUFFERS = 2
SWIZZLED = plgpu.TilingTransform((8, BATCH_TILE)), plgpu.SwizzleTransform(2 * BATCH_TILE)


class _Block(NamedTuple):
    """The operations of a thread block. Values are (64, 16): its units, the rows of its cluster."""

    read: Callable[..., Array]
    """read(x, t, part): its tile of x at step t; `part` chooses z, r or n if x has several."""
    write: Callable[..., None]
    """write(x, t, value, part): write to the same place of an output."""
    send: Callable[..., None]
    """send(buffer, value): copy a value, as bfloat16, to this buffer of all blocks, once free."""
    receive: Callable[..., None]
    """receive(buffer, count): wait until all blocks' values are there; `count` is how often this
    buffer has been received before."""
    product: Callable[..., Array]
    """product(buffer, gate, plus): multiply its columns of the gate's U by what was received;
    return `plus` and this product. Sums are float32."""
    release: Callable[..., None]
    """release(buffer): tell all blocks that this one no longer needs what the buffer holds."""


def _run(
    body: Callable[[_Block, Array, Sequence[Any], Sequence[Any]], Array],
    U: Sequence[Float[Array, "H H"]],
    state: Float[Array, "B H"],
    inputs: Sequence[Float[Array, "T B _"]],
    outputs: Sequence[int],
    interpret: Any,
) -> tuple[Array, ...]:
    """Run `body` in every thread block: the code that the forward and the backward pass share.

    Args:
      body: (operations, tile of the state, references to the inputs, references to the outputs) →
        tile of the state after the last step, for one block. It receives and releases as often as
        it sends.
      U: the matrices of z, r and n, by which rows are multiplied from the right.
      state: the state before the first step.
      inputs: arrays over time, with H units or a multiple.
      outputs: the width of each output, in multiples of H.
      interpret: False, or parameters of Mosaic GPU's interpreter. It has no copies between blocks:
        they go through global memory.

    Returns:
      The outputs (T, B, _), then the state after the last step.
    """
    (T, B), H = inputs[0].shape[:2], state.shape[-1]
    C, rest = divmod(H, BLOCK)
    if rest or not 0 < C <= MAX_CLUSTER:
        raise ValueError(f"H is {H}; there is a kernel for multiples of {BLOCK} up to 512.")
    rows = -(-B // BATCH_TILE)

    def kernel(*refs, weights, buffers, weights_loaded, full, free, loaded):
        U_ref, num_tiles, state_in, *refs = refs
        num_tiles = num_tiles[0]
        ins, outs = refs[: len(inputs)], refs[len(inputs) :]
        state_out, exchange = outs[len(outputs)], outs[-1]  # the latter for the interpreter only
        row, block = lax.axis_index("row"), lax.axis_index("cluster")

        # Global memory has rows of units; so 8 units of 4 rows are loaded at once, full sectors
        def read(x, t, part=0):
            x = x.at[t, row, :, part, block, :]
            if interpret:
                return x[...].T
            x = load(plgpu.transpose_ref(x, (1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
            return plgpu.layout_cast(x, plgpu.Layout.WGMMA)

        def write(x, t, value, part=0):
            x = x.at[t, row, :, part, block, :]
            if interpret:
                x[...] = value.T
            else:
                x = plgpu.transpose_ref(x, (1, 0))
                x[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)

        def send(buffer, value):
            plgpu.barrier_wait(free.at[buffer])
            buffers[buffer, block] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            if not interpret:
                _copy_to_others(buffers.at[buffer, block], full.at[buffer])
                return
            if C > 1:
                plgpu.copy_smem_to_gmem(buffers.at[buffer, block], exchange.at[row, buffer, block])
                plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(full.at[buffer])

        def receive(buffer, count):
            if not interpret:
                _wait(full.at[buffer], jnp.int32(count) % 2)
                return
            plgpu.barrier_wait(full.at[buffer])
            for i in range(C if C > 1 else 0):
                tile = exchange.at[row, buffer, i]
                plgpu.copy_gmem_to_smem(tile, buffers.at[buffer, i], loaded)
            if C > 1:
                plgpu.barrier_wait(loaded)

        def product(buffer, gate, plus=0.0):
            def multiply(acc):
                @pl.loop(0, num_tiles)
                def _(i):
                    plgpu.wgmma(acc, weights.at[gate * C + i], buffers.at[buffer, i])

                return acc[...]

            return plus + pl.run_scoped(multiply, ACC(TILE))

        def release(buffer):
            plgpu.commit_smem()  # all threads have multiplied
            plgpu.barrier_arrive(free.at[buffer])

        for i in range(3 * C):
            plgpu.copy_gmem_to_smem(U_ref.at[block, i], weights.at[i], weights_loaded)
        for buffer in range(BUFFERS):
            if not interpret:
                _initialize(full.at[buffer])
            release(buffer)
        plgpu.barrier_wait(weights_loaded)
        means = _Block(read, write, send, receive, product, release)
        write(state_out, 0, body(means, read(state_in, 0), ins, outs[: len(outputs)]))
        for buffer in range(BUFFERS):  # a block may not end before all others have arrived at it
            plgpu.barrier_wait(free.at[buffer])

    def split(x):
        """Reshape (T, B, k·H) to (T, rows, 16, k, blocks, 64), to index a block's tile."""
        x = jnp.pad(x, [(0, 0), (0, rows * BATCH_TILE - B), (0, 0)])
        return x.reshape(len(x), rows, BATCH_TILE, -1, C, BLOCK)

    def joined(x):
        return x.reshape(len(x), rows * BATCH_TILE, -1)[:, :B]

    # For each block, its units' columns of all matrices, transposed, in tiles: 64 units times 64
    # units of what is multiplied
    tiled = jnp.stack(U).reshape(3, C, BLOCK, C, BLOCK).transpose(3, 0, 1, 4, 2)
    tiled = tiled.reshape(C, 3 * C, BLOCK, BLOCK).astype(jnp.bfloat16)
    num_tiles = jnp.full(1, C, jnp.int32)  # in memory, so that no loop over tiles is unrolled
    shapes = [(T, rows, BATCH_TILE, k, C, BLOCK) for k in outputs]
    shapes.append((1, rows, BATCH_TILE, 1, C, BLOCK))
    out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    if interpret:
        out_type.append(jax.ShapeDtypeStruct((rows, BUFFERS, C, *TILE), jnp.bfloat16))
    events: Any = plgpu.Barrier(num_barriers=BUFFERS)
    if C > 1:
        events = plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=BUFFERS)
    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=dict(
            weights=plgpu.SMEM((3 * C, BLOCK, BLOCK), jnp.bfloat16, transforms=SWIZZLED),
            buffers=plgpu.SMEM((BUFFERS, C, *TILE), jnp.bfloat16, transforms=SWIZZLED),
            weights_loaded=plgpu.Barrier(num_arrivals=3 * C),
            full=events if interpret else plgpu.SMEM((BUFFERS, 2), jnp.int32),
            free=events,
            loaded=plgpu.Barrier(num_arrivals=C),
        ),
        grid=(rows,),
        grid_names=("row",),
        cluster=(C,),
        cluster_names=("cluster",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=body.__name__,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup  # the default from JAX 0.11 on
        ),
    )(tiled, num_tiles, *map(split, (state[None], *inputs)))
    *series, last = map(joined, results[: len(shapes)])
    return *series, last[0]


# --- The exchange between thread blocks
#
# `plgpu.async_store_smem` announces its bytes at the barrier of each destination, from every thread
# and with release semantics in the cluster. This compiles to a fence of all memory for each
# destination: 8 per value sent. Here, the receiver itself announces what it will get. The barrier
# is a word of shared memory, since inline code cannot be given one of Pallas's barriers.

MBARRIER = plgpu.RefType()
inline: Any = plgpu.inline_mgpu  # which adds the first parameter, a context


def _ptx(text: str, *operands: Any) -> None:
    """Insert PTX, in which $0, $1, … are the operands: addresses or 32-bit integers."""
    constraints = ",".join(["r"] * len(operands) + ["~{memory}"])
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, list(operands), f"{{{text}}}", constraints, has_side_effects=True)


@inline(arg_types=(MBARRIER,))
def _initialize(_: Any, mbarrier: Any) -> None:
    """Let a barrier wait for one thread's announcement and for the bytes announced."""
    text = """
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$0], 1;
        fence.mbarrier_init.release.cluster;
    """
    _ptx(text, memref_ptr(mbarrier))


@inline(arg_types=(plgpu.RefType(SWIZZLED), MBARRIER))
def _copy_to_others(_: Any, tile: Any, mbarrier: Any) -> None:
    """Copy a tile to its place in all other blocks, and announce theirs at the own barrier.

    Every 16th thread is responsible for one block of the cluster.
    """
    size = 2 * BLOCK * BATCH_TILE
    text = f"""
        .reg .pred one, own, other;
        .reg .b32 thread, block, rest, here, blocks, bytes, to, barrier;
        mov.u32 thread, %tid.x;
        mov.u32 here, %cluster_ctarank;
        mov.u32 blocks, %cluster_nctarank;
        shr.u32 block, thread, 4;
        and.b32 rest, thread, 15;
        setp.eq.u32 one, rest, 0;
        setp.eq.and.u32 own, block, here, one;
        setp.lt.and.u32 other, block, blocks, one;
        setp.ne.and.u32 other, block, here, other;
        mad.lo.u32 bytes, blocks, {size}, -{size};
        @own mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], bytes;
        @other mapa.shared::cluster.u32 to, $0, block;
        @other mapa.shared::cluster.u32 barrier, $1, block;
        @other cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [to], [$0], {size}, [barrier];
    """
    _ptx(text, memref_ptr(tile), memref_ptr(mbarrier))


@inline(arg_types=(MBARRIER, plgpu.Layout.WG_SPLAT(())))
def _wait(_: Any, mbarrier: Any, parity: Any) -> None:
    """Wait until a barrier has completed a phase: 0, 1, 0, …"""
    text = """
        .reg .pred done;
        again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
        @!done bra again;
    """
    _ptx(text, memref_ptr(mbarrier), parity.registers.item())


# --- The GRU


def gru_forward(
    Uzr: Float[Array, "H 2*H"],
    Un: Float[Array, "H H"],
    h0: Float[Array, "B H"],
    a: Float[Array, "T B 3*H"],
    mask: Mask | None,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "T B H"], Float[Array, "T B 2*H"], Float[Array, "T B H"]]:
    """Return the (masked) state after each step, and z, r and n of each step."""
    T = len(a)
    H, RH = range(BUFFERS)

    def gru_rows_forward_steps(do, h, inputs, outputs):
        (a, *scale), (h_out, zr_out, n_out) = inputs, outputs

        def read(t):
            return [do.read(a, t, part) for part in (Z, R, N)], [do.read(x, t) for x in scale]

        def step(t, loop):
            h, ((a_z, a_r, a_n), scale_t) = loop
            do.receive(H, t)
            r = sigmoid(do.product(H, R, a_r))
            do.send(RH, r * h)
            z = sigmoid(do.product(H, Z, a_z))
            do.release(H)
            following = read(jnp.minimum(t + 1, T - 1))
            do.write(zr_out, t, r, part=R)
            do.write(zr_out, t, z, part=Z)
            do.receive(RH, t)
            n = jnp.tanh(do.product(RH, N, a_n))
            h = (1 - z) * h + z * n
            for x in scale_t:
                h = h * x
            do.send(H, h)
            do.release(RH)
            do.write(n_out, t, n)
            do.write(h_out, t, h)
            return h, following

        do.send(H, h)
        h, _ = lax.fori_loop(0, T, step, (h, read(0)))
        do.receive(H, T)
        do.release(H)
        return h

    U = [*jnp.split(Uzr, 2, axis=1), Un]
    h, zr, n, _ = _run(gru_rows_forward_steps, U, h0, [a, *scaled(mask)], (1, 2, 1), interpret)
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
    interpret: Any = False,
) -> tuple[Float[Array, "B H"], Float[Array, "T B 3*H"]]:
    """Return the gradients of h0 and a, as the backward scan of `cells.gru.RESET_BEFORE`.

    Three values are sent in a step. One buffer has da_n, then da_r; the other has da_z. They change
    roles from step to step: da_n goes where da_z was, which all have multiplied before da_r.
    """
    T = len(n)

    def gru_rows_backward_steps(do, dh, inputs, outputs):
        (dh_out, h_before, zr, n_in, *scale), (da,) = inputs, outputs

        def read(t):
            z, r = (do.read(zr, t, part) for part in (Z, R))
            factors = [do.read(x, t) for x in scale]
            return do.read(dh_out, t), factors, z, r, do.read(n_in, t), do.read(h_before, t)

        def step(i, loop):
            dh, (from_loss, scale_t, z, r, n, h) = loop
            t, NR, Z_ = T - 1 - i, i % 2, 1 - i % 2
            pair = i // 2  # in two steps, each buffer is received 3 times
            dh = dh + from_loss
            for x in scale_t:
                dh = dh * x
            da_n = dh * z * (1 - n * n)
            do.send(NR, da_n)
            da_z = dh * (n - h) * z * (1 - z)
            do.send(Z_, da_z)
            following = read(jnp.maximum(t - 1, 0))
            do.write(da, t, da_n, part=N)
            do.write(da, t, da_z, part=Z)
            do.receive(NR, 3 * pair + i % 2)
            d_rh = do.product(NR, N)
            do.release(NR)
            da_r = d_rh * h * r * (1 - r)
            do.send(NR, da_r)
            do.receive(Z_, 3 * pair + 2 * (i % 2))
            dh = do.product(Z_, Z, dh * (1 - z) + d_rh * r)
            do.release(Z_)
            do.write(da, t, da_r, part=R)
            do.receive(NR, 3 * pair + i % 2 + 1)
            dh = do.product(NR, R, dh)
            do.release(NR)
            return dh, following

        return lax.fori_loop(0, T, step, (dh, read(T - 1)))[0]

    U = [U.T for U in (*jnp.split(Uzr, 2, axis=1), Un)]
    series = [dh_out, h_before, zr, n, *scaled(mask)]
    da, dh0 = _run(gru_rows_backward_steps, U, jnp.zeros_like(n[0]), series, (3,), interpret)
    return dh0, da


def gru(
    Uzr: Float[Array, "H 2*H"],
    Un: Float[Array, "H H"],
    h0: Float[Array, "B H"],
    a: Float[Array, "T B 3*H"],
    mask: Mask | None,
    interpret: Any = False,
) -> Float[Array, "T B H"]:
    """Compute h of every step by `RESET_BEFORE`, and its gradient, if `supports` allows it."""
    passes = partial(gru_forward, interpret=interpret), partial(gru_backward, interpret=interpret)
    return differentiable(*passes)(Uzr, Un, h0, a, mask)


def over_time(layer: Recurrent, h0: Array, a: Array, mask: Mask | None) -> tuple[Array, Array]:
    """Compute `cells.over_time.over_time` for a layer that `gru_hopper.supports_layer` accepts."""
    h = gru(layer.U[0], layer.U[1], h0, a, mask)
    return h, h[-1]
