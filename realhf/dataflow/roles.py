"""Knows which workers hold which model role, and what the master asks all workers of a role for beside the graph."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from realhf.api.calls import (
    INITIALIZE,
    OPEN_WORLD,
    RESTORE,
    SAVE,
    CheckpointRequest,
    InitializeRequest,
    OpenWorldRequest,
    SavedFile,
)
from realhf.api.experiment import ExperimentSpec
from realhf.api.parallel import Parallel
from realhf.base.messages import Call
from realhf.dataflow.caller import A, Caller, Q, ask
from realhf.dataflow.group_call import GroupNumbers, first_failure, gather_weights


class Roles:
    """The model workers of a run, ``model_worker/0`` and so on. ``timeout_s`` bounds what one is asked for;
    ``trusted``: nobody else is on the network, so that workers may train together over it."""

    def __init__(self, spec: ExperimentSpec, caller: Caller, *, timeout_s: float, trusted: bool = False) -> None:
        self._spec, self._caller, self._timeout_s, self._trusted = spec, caller, timeout_s, trusted
        self.numbers = GroupNumbers()
        self.workers = [_name(index) for index in range(spec.n_model_workers)]

    @property
    def parallel(self) -> Mapping[str, Parallel]:
        """How the workers of each role train together."""
        return {role: model.parallel for role, model in self._spec.models.items()}

    def of(self, role: str) -> list[str]:
        """The workers of a role; of one that trains on several, in the order of ranks. What one worker does for all,
        the first does."""
        model = self._spec.models[role]
        return [_name(i) for i in (sorted(model.workers) if model.parallel.size > 1 else model.workers)]

    def by_role(self) -> dict[str, list[str]]:
        """The workers of every role."""
        return {role: self.of(role) for role in self._spec.models}

    async def load(self) -> None:
        """Have every worker load its models. Those that compute together meet at the first of them. Raises RuntimeError
        when they are on several hosts, unless the network is trusted."""
        members = [_name(index) for index in self._spec.world]
        roster = {name: self._caller.roster[name] for name in members}
        hosts = {name: info.host for name, info in roster.items()}
        several_hosts = len({(info.host, info.machine) for info in roster.values()}) > 1
        if several_hosts and not self._trusted:
            on = ", ".join(f"{name} on {host}" for name, host in hosts.items())
            raise RuntimeError(
                f"workers that train together must be on one host (and in one network); they are {on}. What they send "
                "each other is neither encrypted nor authenticated: say network.trusted=true where nobody but the run "
                "is on the network between them"
            )
        world = token = ""
        if members:
            answer = await ask(
                self._caller, members[0], OPEN_WORLD, OpenWorldRequest(several_hosts), timeout_s=self._timeout_s
            )
            world, token = answer.address, secrets.token_hex(16)
        await self._of_all(INITIALIZE, [InitializeRequest(world, token)] * len(self.workers))

    async def gather_weights(self, role: str) -> None:
        """Bring the whole weights together on the first worker of a role whose model is cut over workers: it acts alone
        next."""
        if self._spec.models[role].parallel.fsdp > 1:
            await gather_weights(
                self._caller, self.numbers, role, self.of(role), everywhere=False, timeout_s=self._timeout_s
            )

    async def save(self, folder: Path) -> list[SavedFile]:
        """Have every worker write its state below ``folder``; return what they wrote. Each has a folder of its own
        there, and a role whose workers train together has one for all of them."""
        answers = await self._of_all(SAVE, [self._request(worker, folder) for worker in self.workers])
        return [file for answer in answers for file in answer.files]

    async def restore(self, folder: Path) -> None:
        """Have every worker read its state, from where it lies: a checkpoint may have been made by other workers."""
        await self._of_all(RESTORE, [self._request(worker, folder) for worker in self.workers])

    async def _of_all(self, call: Call[Q, A], requests: Sequence[Q]) -> list[A]:
        """Send its request to every worker; return the answers. Raises the failure of the worker that failed by itself:
        those that compute together with it fail as well."""
        futures = [
            self._caller.call(worker, call.name, call.pack(request), timeout_s=self._timeout_s)
            for worker, request in zip(self.workers, requests, strict=True)
        ]
        try:
            failed = await first_failure(self._caller, self.workers, futures, together=bool(self._spec.world))
            if failed is not None:
                raise failed.cause
            return [
                call.unpack_answer(future.result(), worker)
                for worker, future in zip(self.workers, futures, strict=True)
            ]
        finally:
            for future in futures:
                future.cancel()

    def _request(self, worker: str, folder: Path) -> CheckpointRequest:
        own = folder / worker.replace("/", "-")
        roles = {}
        for role, model in self._spec.models.items():
            if model.trainable and worker in self.of(role):
                usual = folder / role if model.parallel.size > 1 else own / role
                roles[role] = str(usual if usual.is_dir() else role_folder(folder, role) or usual)
        return CheckpointRequest(roles, str(own))


def role_folder(checkpoint: Path, role: str) -> Path | None:
    """Where a checkpoint holds a role: below the folder of the one worker that trained it, or, where several did, in a
    folder of its own. None if it does not hold it."""
    together = checkpoint / role
    found: Sequence[Path] = [folder for folder in sorted(checkpoint.glob(f"model_worker-*/{role}")) if folder.is_dir()]
    return together if together.is_dir() else next(iter(found), None)


def _name(index: int) -> str:
    return f"model_worker/{index}"
