"""Predict the rows of systems that are no pipelines of ours, by closed forms with the constants of `costs`.

Every form adds up: products, exchanges that nothing hides, sums of gradients, the idle time of the pipeline,
the optimizer, and the sum of gradients over replicas. What each system hides is assumed as its documentation
says, and stated with its function.
"""

from __future__ import annotations

from dataclasses import dataclass

from paper.costs import DATA, MODEL, SUM_PASSES, Constants
from paper.models import MODELS, ModelShape
from paper.rows import FSDP, GPUS_PER_NODE, NEMO, SPMD, Row

WEIGHT_BYTES = 2
"""The bytes of a weight, an activation or a gradient: bfloat16."""

UPDATE_BYTES = 28
"""The bytes that an update reads and writes for each parameter: a gradient and a weight of 2 bytes, and a
master weight and two moments of 4 bytes, which are read and written."""

FORWARD_EXCHANGES, BACKWARD_EXCHANGES = 4, 2
"""The exchanges of a layer among the GPUs that share it for which they wait: in the forward two all-gathers
and two reduce-scatters, in the backward the gathers of two gradients (`costs.exposed_exchanges`)."""

STACK_PASSES = 2
"""How often the gradients of a scan over layers cross the memory besides: they are read and written into a
stack, since products of cuBLAS do not write there."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of a part of a model for some sequences, on all GPUs together.

    Args:
        forward: those of the forward.
        backward: those of the backward, in which attention computes its scores again.
    """

    forward: float
    backward: float


def layer_flops(shape: ModelShape, sequences: int) -> Flops:
    """Return the operations of a transformer layer.

    A token takes two operations for each parameter, and attention two products of its features with all
    tokens of the sequence. The backward takes twice as many; of attention, five products in place of two.
    """
    tokens = sequences * shape.seq_len
    weights = 2 * tokens * shape.layer_parameters
    product = 2 * tokens * shape.seq_len * shape.dim
    return Flops(weights + 2 * product, 2 * weights + 5 * product)


def head_flops(shape: ModelShape, sequences: int) -> Flops:
    """Return the operations of the output projection."""
    forward = 2 * sequences * shape.seq_len * shape.dim * shape.vocab
    return Flops(forward, 2 * forward)


def exchange_s(shape: ModelShape, constants: Constants, sequences: int, devices: int) -> float:
    """Return the seconds of one exchange of the activations between layers, among GPUs of a node."""
    size = WEIGHT_BYTES * sequences * shape.seq_len * shape.dim
    return constants.exchange_s("all-gather", MODEL, devices, size)


def update_s(constants: Constants, parameters: float) -> float:
    """Return the seconds in which a GPU updates some parameters."""
    return UPDATE_BYTES * parameters / constants.bytes_per_s


def replicas_s(constants: Constants, parameters: float, replicas: int) -> float:
    """Return the seconds of the sum over replicas of the gradients of a GPU's parameters."""
    if replicas == 1:
        return 0.0
    return constants.exchange_s("all-reduce", DATA, replicas, WEIGHT_BYTES * parameters)


def passes_s(constants: Constants, parameters: float, passes: int, itemsize: int = WEIGHT_BYTES) -> float:
    """Return the seconds in which numbers of a GPU's parameters, one for each, cross its memory.

    Args:
        constants: the constants.
        parameters: the number of parameters.
        passes: how often they cross the memory.
        itemsize: the bytes of a number.
    """
    return passes * itemsize * parameters / constants.bytes_per_s


# ---------------------------------------------------------------- FSDP


def fsdp_traffic_s(shape: ModelShape, constants: Constants, shards: int) -> float:
    """Return the seconds of the traffic of FSDP, if nothing else went on.

    All parameters are gathered for the forward and for the backward, and all gradients reduced and scattered.
    The ring passes all GPUs of a node, whose ports share the bytes between nodes.
    """
    rate = min(constants.link_bytes_per_s(MODEL), GPUS_PER_NODE * constants.link_bytes_per_s(DATA))
    return 3 * WEIGHT_BYTES * shape.num_parameters * (shards - 1) / shards / rate


def fsdp_s(row: Row, constants: Constants) -> float:
    """Return the seconds of a step of fully sharded data parallelism.

    Assumed: layers are recomputed in full in the backward; a part `exposed` of the traffic is not hidden; the
    sum over replicas of shards comes after the backward.
    """
    shape = MODELS[row.model]
    layer, head = layer_flops(shape, row.microbatch), head_flops(shape, row.microbatch)
    flops = shape.num_layers * (2 * layer.forward + layer.backward) + head.forward + head.backward
    own = shape.num_parameters / row.fsdp
    step = (
        flops / constants.flops_per_s
        + constants.exposed * fsdp_traffic_s(shape, constants, row.fsdp)
        + replicas_s(constants, own, row.data)
        + update_s(constants, own)
    )
    return step * constants.straggling_factor(row.nodes)


# ---------------------------------------------------------------- pipelines


def spmd_pipeline_s(row: Row, constants: Constants) -> float:
    """Return the seconds of a step of a pipeline inside one SPMD program (GPipe).

    The program is a loop in which all stages compute at once, also those that have no microbatch yet or any
    more, and then pass their results on. So there are `microbatches + stages - 1` rounds forward and as many
    backward.

    Assumed: layers are recomputed in full in the backward; each round ends with its transfer, of activations
    that are not split among the GPUs of a stage; every backward round adds to the sums of gradients, which a
    scan over the stage's layers first writes into a stack; the output projection is shared by all GPUs, after
    the loop.
    """
    shape = MODELS[row.model]
    layers, rounds = shape.num_layers / row.pipeline, row.microbatches + row.pipeline - 1
    layer, head = layer_flops(shape, row.microbatch), head_flops(shape, row.global_batch)
    products = (2 * layer.forward + layer.backward) / row.tensor / constants.flops_per_s
    recomputed = FORWARD_EXCHANGES - 1  # nothing in the backward reads the layer's output
    waits = FORWARD_EXCHANGES + recomputed + BACKWARD_EXCHANGES
    exchanges = waits * exchange_s(shape, constants, row.microbatch, row.tensor)
    own = shape.num_parameters / row.pipeline / row.tensor
    sent = WEIGHT_BYTES * row.microbatch * shape.seq_len * shape.dim
    passing = 2 * sent / constants.link_bytes_per_s(DATA)
    summing = passes_s(constants, own, SUM_PASSES + STACK_PASSES)
    round_s = layers * (products + exchanges) + summing + passing
    step = (
        rounds * round_s
        + (head.forward + head.backward) / row.gpus / constants.flops_per_s
        + replicas_s(constants, own, row.data)
        + update_s(constants, own)
    )
    return step * constants.straggling_factor(row.nodes)


def nemo_s(row: Row, constants: Constants) -> float:
    """Return the seconds of a step of NeMo's interleaved pipeline (Megatron-LM).

    The last actor has the output projection besides its layers; it is busy in all microbatches and idle for
    `pipeline - 1` stages.

    Assumed: nothing is recomputed but attention's scores; products add to float32 sums of gradients
    themselves (gradient accumulation fusion), so that the sums are read and written once a microbatch;
    transfers between stages and the sum over replicas are hidden (`overlap_p2p_comm`, `overlap_grad_reduce`),
    and the update is shared by the replicas (distributed optimizer).
    """
    assert row.repeat is not None
    shape = MODELS[row.model]
    layers = shape.num_layers / row.pipeline
    layer, head = layer_flops(shape, row.microbatch), head_flops(shape, row.microbatch)
    products = (layer.forward + layer.backward) / row.tensor / constants.flops_per_s
    exchanges = (FORWARD_EXCHANGES + BACKWARD_EXCHANGES) * exchange_s(
        shape, constants, row.microbatch, row.tensor
    )
    own = shape.num_parameters / row.pipeline / row.tensor
    summing = passes_s(constants, own, 2, FLOAT32_BYTES)
    of_microbatch = layers * (products + exchanges) + summing
    projection = (head.forward + head.backward) / row.tensor / constants.flops_per_s
    idle = (row.pipeline - 1) * of_microbatch / row.repeat
    step = row.microbatches * (of_microbatch + projection) + idle + update_s(constants, own / row.data)
    return step * constants.straggling_factor(row.nodes)


FORMS = {FSDP: fsdp_s, SPMD: spmd_pipeline_s, NEMO: nemo_s}
"""The closed form of each system."""
