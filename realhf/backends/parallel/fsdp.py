"""Backend ``fsdp2``: training of a model that is sharded over ranks, with block-by-block loading
and gathering of the weights.

The model is built with its parameters on the device ``meta``, which takes no memory; its computed
buffers are real. Before a block is sharded, every rank reads the block's parameters from the
folder, keeps its own shard, and frees the others before the next block.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from realhf.api.config import LoraConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import LossFn, PostFn, TrainResult
from realhf.api.parallel import WeightsNotGathered
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.parallel.ddp import GroupBackend, GroupEngine
from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld, build_mesh
from realhf.backends.training.checkpoint import persistent_buffers
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_folder
from realhf.backends.training.torch_backend import (
    ValueModel,
    choose_attention,
    find_logit_problem,
    load_value_model,
)
from realhf.backends.training.torch_engine import find_blocks

WEIGHTS_FILE = "model.safetensors"
"""Name of the weights file if there is only one."""
INDEX_FILE = "model.safetensors.index.json"
"""Name of the index file if the weights are split into several files."""
_log = logging.getLogger(__name__)


class FolderWeights:
    """Reader that loads a model's parameters from the device ``meta``, and its persistent buffers,
    from a folder to ``device`` as ``dtype``.

    It must be created before the model is wrapped or changed, while its parameters still have the
    names used in the folder.
    """

    def __init__(
        self, model: Any, folder: Path, device: torch.device, dtype: torch.dtype, *, with_head: bool
    ) -> None:
        """Find the tensors of the model in the folder.

        Raises ValueError unless the folder has every tensor, with its name and shape; without
        ``with_head`` the projection to the vocabulary may be missing.
        """
        self._device = device
        self._dtype = dtype
        self._files = _map_tensor_files(folder)
        self._names: dict[int, str] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._buffers: dict[int, str] = {}
        self._parameters_alive: list[
            nn.Parameter
        ] = []  # keeps objects alive, so that ids stay unique
        head = None if with_head else model.get_output_embeddings()
        base_prefix = f"{model.base_model_prefix}."
        aliases: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    aliases.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
                    self._owners.setdefault(id(parameter), []).append((module, name))
                    self._parameters_alive.append(parameter)
        shapes = {id(parameter): tuple(parameter.shape) for parameter in self._parameters_alive}
        optional = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        for key, names in aliases.items():
            stored_name = next(
                (
                    n
                    for name in names
                    for n in (name, name.removeprefix(base_prefix))
                    if n in self._files
                ),
                None,
            )
            if stored_name is None and key in optional and len(names) == 1:
                continue
            if stored_name is None:
                raise ValueError(f"it has no tensor {names[0]}")
            if (stored_shape := self._shape(stored_name)) != shapes[key]:
                raise ValueError(
                    f"{stored_name} has the shape {stored_shape}, in the model {shapes[key]}"
                )
            self._names[key] = stored_name
        state = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in state and name in self._files:
                self._buffers[id(buffer)] = name

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Load those parameters of ``module`` that are on the device ``meta``; tied parameters stay
        tied."""
        for parameter in list(module.parameters()):
            if not parameter.is_meta:
                continue
            if (name := self._names.get(id(parameter))) is None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the folder's"
                )
            read = self._read(name).to(device=self._device, dtype=self._dtype)
            real = nn.Parameter(read, requires_grad=parameter.requires_grad)
            for owner, attribute in self._owners[id(parameter)]:
                owner._parameters[attribute] = real
        for buffer in module.buffers():
            if (name := self._buffers.get(id(buffer))) is not None:
                buffer.copy_(self._read(name))

    def _read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


def build_without_memory(
    path: str,
    role: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_head: bool = True,
    experts: bool | None = None,
) -> tuple[Any, FolderWeights] | None:
    """Return the model of a folder with parameters on the device ``meta``, in evaluation mode, and
    a reader for its weights.

    Returns None and logs a warning if the folder does not support this; the whole model must then
    be loaded at once, which also reports errors in the folder. Raises ModelLoadError.
    """
    check_folder(path, role)
    kernel = choose_attention(path, role, experts)
    config = AutoConfig.from_pretrained(path)
    try:
        if get_checkpoint_conversion_mapping(config.model_type) is not None:
            raise ValueError(f"transformers converts tensors of {config.model_type}")
        with _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=kernel
            )
        weights = FolderWeights(model, Path(path), device, dtype, with_head=with_head)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        _log.warning(
            "%s.path=%s is loaded whole on each worker before it is sharded: %s", role, path, error
        )
        return None
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval(), weights


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Context manager that moves every parameter registered with a module in the block to the
    device ``meta``."""

    def drop(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(drop)
    try:
        yield
    finally:
        handle.remove()


def _map_tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file that contains each tensor, by tensor name. Raises ValueError if there are no
    safetensors files."""
    if (folder / INDEX_FILE).is_file():
        file_of_tensor: dict[str, str] = json.loads(
            (folder / INDEX_FILE).read_text(encoding="utf-8")
        )["weight_map"]
        # Use only the file name: an index must not refer to files outside of the folder.
        return {name: folder / Path(file).name for name, file in file_of_tensor.items()}
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError("it has no safetensors files")
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS_FILE)


class ShardedModel(nn.Module):
    """Wrapper whose forward pass calls a given function. During that call, everything outside the
    blocks (embeddings, last norm, head) is unsharded, so that a loss can use it after the
    decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``run``."""
        return run()


def shard_model(
    model: Any, mesh: DeviceMesh, fill: Callable[[nn.Module], None] = lambda _: None
) -> ShardedModel:
    """Shard the parameters of ``model`` over the last dimension of ``mesh``, in place. Gradients
    are summed over the whole mesh, in fp32. Tied weights stay tied, because they belong to no
    block.

    ``fill`` is called with each part before it is sharded, to load its parameters. Raises
    ValueError for a model that does not define its blocks.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} does not declare which of its modules are blocks, so it "
            "cannot be sharded"
        )
    whole = ShardedModel(model)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks:
        fill(block)
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fill(whole)
    fully_shard(whole, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return whole


def build_meta_copy(model: Any) -> Any:
    """Return an unsharded model of the same architecture on the device ``meta``, for
    ``gather_into``."""
    with torch.device("meta"):
        language_model = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        empty = ValueModel(language_model) if isinstance(model, ValueModel) else language_model
    if (generation := getattr(model, "generation_config", None)) is not None:
        empty.generation_config = generation  # is exported with the weights
    return empty.eval()


def gather_into(copy: Any | None, model: Any) -> None:
    """Gather a sharded model's weights, one tensor at a time, into ``copy``, which
    ``build_meta_copy`` created. With ``copy=None`` this rank only sends its shards. All ranks of
    the model must call this."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if copy is not None:
            _set(
                copy,
                name,
                nn.Parameter(full if full is not tensor else full.clone(), requires_grad=False),
            )
    if copy is None:
        return
    for name, buffer in model.named_buffers():
        _set(copy, name, buffer.detach().clone())
    if not isinstance(copy, ValueModel):
        copy.tie_weights()
    empty = [
        name
        for name, tensor in [*copy.named_parameters(), *persistent_buffers(copy).items()]
        if tensor.is_meta
    ]
    if empty:
        raise RuntimeError(
            f"{type(model).__name__}: {empty[0]} was not gathered ({len(empty)} tensors were not)"
        )


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or a buffer with a tensor."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    table: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
    table[last] = tensor


class FsdpEngine(GroupEngine):
    """``TorchEngine`` with a shard of the weights, which computes only in group calls (inside
    ``together``).

    ``folder_weights`` loads the parameters of ``model`` that are still on the device ``meta``, part
    by part, before each part is sharded. ``gather`` collects the full weights for generation,
    export and publication; ``release_generation`` frees them when they have been used.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        ranks: GroupRanks,
        mesh: DeviceMesh,
        role: str,
        folder_weights: FolderWeights | None = None,
        **options: Any,
    ) -> None:
        self._mesh = mesh
        self._folder_weights = folder_weights
        self._whole: ShardedModel | None = None
        self._copy: Any = None
        self._awaited = False
        with ranks.together(f"the weights of {role}"):
            super().__init__(model, tokenizer, ranks=ranks, role=role, **options)
        self._generator = None  # it would use the shards of this rank

    def _build_forward(
        self, lora: LoraConfig | None, path: str, adapts_head: bool
    ) -> PackedForward:
        folder_weights = self._folder_weights
        mesh = self._mesh
        if folder_weights is None:
            forward = super()._build_forward(lora, path, adapts_head)
            self._check_layouts(forward)
            self._whole = shard_model(self.model, mesh)
            return forward
        whole = self._whole = shard_model(self.model, mesh, folder_weights.fill)

        def run() -> PackedForward:
            if problem := find_logit_problem(self.model):
                raise ModelLoadError(f"{self._role}.path={path}: {problem}")
            return super(FsdpEngine, self)._build_forward(lora, path, adapts_head)

        try:
            forward = whole(run)
        finally:
            self._reshard()
        self._check_layouts(forward)
        return forward

    def _run_pass(self, empty: bool, run: Callable[[], Tensor]) -> Tensor:
        assert self._whole is not None
        return run() if empty else self._whole(run)

    def _no_gradient_mode(self) -> contextlib.AbstractContextManager[Any]:
        # Tensors gathered in inference mode could not be used by a later train step.
        return torch.no_grad()

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        *,
        mb_spec: MicroBatchSpec,
        normaliser: float = 1.0,
    ) -> TrainResult:
        """See ``Engine.train_batch``. Frees the gathered weights, because they become stale and
        their memory is needed."""
        self._forget()
        result = super().train_batch(sample, loss_fn, mb_spec=mb_spec, normaliser=normaliser)
        self._reshard()
        return result

    def forward(
        self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec
    ) -> Tensor:
        """See ``Engine.forward``."""
        result = super().forward(sample, post_fn, mb_spec=mb_spec)
        self._reshard()
        return result

    def _reshard(self) -> None:
        """Free the other ranks' shards, as a backward pass does automatically. After a pass without
        backward, the parameters outside the blocks would stay unsharded: they take memory, and they
        are not the tensors that the optimizer and checkpoints use."""
        cast(FSDPModule, self._whole).reshard()

    # ---- full weights

    def gather(self, here: bool = True) -> None:
        """Gather the full weights on the ranks that need them (``here``). They are there until
        ``release_generation`` after their first use, or the next train step. All ranks must call
        this inside ``together``."""
        if here:
            self._forget()  # free the previous copy first
        copy = build_meta_copy(self.model) if here else None
        with torch.no_grad():
            gather_into(copy, self.model)
        if copy is not None:
            self._copy = copy
            self._awaited = True
            self._generator = self._build_generator(copy)
            self._generator.threads = self._threads

    def _forget(self) -> None:
        """Free the gathered weights and their generation engine."""
        self._copy = self._generator = None
        self._awaited = False

    def release_generation(self) -> None:
        """Free the generation engine's keys and values, and the gathered weights if they have been
        used: whoever needs them next gathers them again. Other calls may come between a gathering
        and the work that it is for."""
        super().release_generation()
        if not self._awaited:
            self._forget()

    def _require_copy(self) -> Any:
        """Return the model with the gathered weights, which counts as their use. Raises
        WeightsNotGathered if they were not gathered on this rank."""
        if self._copy is None:
            raise WeightsNotGathered(
                f"{self._role}: its whole weights were not gathered on this worker"
            )
        self._awaited = False
        return self._copy

    def generator(self) -> EmbeddedGenerator:
        """Return the generation engine over the gathered weights. Raises RuntimeError if they were
        not gathered."""
        self._require_copy()
        return super().generator()

    def weights(self) -> dict[str, Tensor]:
        """See ``Engine.weights``. Raises RuntimeError if the weights were not gathered."""
        return self._with_copy(super().weights)

    def export_hf(self, folder: Path) -> None:
        """See ``Engine.export_hf``. Raises RuntimeError if the weights were not gathered."""
        self._with_copy(lambda: super(FsdpEngine, self).export_hf(folder))

    def _with_copy(self, run: Callable[[], Any]) -> Any:
        """Return ``run()`` with the gathered copy as the engine's model instead of the sharded
        one."""
        sharded_model = self.model
        self.model = self._require_copy()
        try:
            return run()
        finally:
            self.model = sharded_model

    def _load(self, folder: Path, group: Any = None) -> None:
        self._forget()
        super()._load(folder, group)


class FsdpBackend(GroupBackend):
    """Builder of engines with a shard of the model on each worker."""

    _folder_weights: FolderWeights | None = None

    def _load_model(self, spec: ModelSpec, dtype: torch.dtype) -> Any:
        """Build the model on the device ``meta`` if its folder can be read part by part; otherwise
        load it."""
        model_and_weights = None
        if spec.parallel.size > 1:
            head = spec.head == "lm"
            model_and_weights = build_without_memory(
                spec.path, spec.role, self._device, dtype, with_head=head, experts=spec.experts
            )
        if model_and_weights is None:
            return super()._load_model(spec, dtype)
        model, self._folder_weights = model_and_weights
        return load_value_model(model, spec.path, spec.role) if spec.head == "value" else model

    def _build_group_engine(
        self, spec: ModelSpec, world: TorchWorld, model: Any, tokenizer: Any, **options: Any
    ) -> FsdpEngine:
        if spec.lora is not None:
            raise ValueError(
                f"{spec.role}.lora.rank={spec.lora.rank}: the backend fsdp2 trains all weights"
            )
        if spec.compile:
            raise ValueError(f"{spec.role}.compile=true: the backend fsdp2 does not compile blocks")
        ranks = GroupRanks(world, spec.workers, sharded=True, device=self._device)
        mesh = build_mesh(world, spec.workers, spec.parallel, ranks, self._device.type)
        return FsdpEngine(
            model,
            tokenizer,
            ranks=ranks,
            mesh=mesh,
            role=spec.role,
            folder_weights=self._folder_weights,
            **options,
        )
