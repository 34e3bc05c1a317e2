"""Transfer of policy weights by memory file (``shm``), shared folder (``disk``) or network
(``fetch``).

- ``shm``: the publisher writes an anonymous memory file, seals it and holds its descriptor; a
  receiver opens it through the publisher's /proc entry. A sealed file cannot change, so it needs no
  checksum of its bytes. It has no name that could be left behind: the kernel frees the memory when
  the last process that uses it ends. The segments of ``realhf.transport.shared_memory`` would not
  do: they are refilled, possibly before a slow receiver has read the weights.
- ``disk``: files are written under a temporary name and renamed, so a file whose name ends in
  ``.safetensors`` is always complete; any safetensors library reads it. The name contains the
  process that wrote the file. At its start a publisher removes the files of killed publishers from
  its folder: of processes of this host that have ended, and of its own predecessor on any host.
  Nothing is synced to the device: recovery starts from a checkpoint, never from these files.
- ``fetch``: receivers request the bytes in pieces (``realhf.transport.bulk``).
- ``nccl``: nothing is stored; the trainer sends its own tensors from GPU to GPU
  (``realhf.backends.vllm.broadcast``), and this module only describes them.

A version stays available until it is retired.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import random
import re
import secrets
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast, get_args

import numpy as np

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.api.keys import ITEMSIZE, TORCH_NAMES, dtype_tag
from realhf.base import process_clock
from realhf.base.files import atomic_file
from realhf.base.loopback import is_loopback_host
from realhf.base.process import host_token, start_time
from realhf.base.tensor_digest import TensorDigester, joint_digest
from realhf.transport.bulk import LANES, BulkConnection, BulkServer, Piece, fetch_whole
from realhf.transport.errors import (
    DataError,
    FetchTimeout,
    NetworkError,
    PeerLost,
    ProtocolError,
    TransportError,
)
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.tls import RunTls

if TYPE_CHECKING:
    from torch import Tensor


class WeightsError(TransportError):
    """Error: weights did not arrive, or do not match their manifest. No tensor was returned."""

    def __init__(self, manifest: WeightsManifest, reason: str) -> None:
        super().__init__(f"weights version {manifest.version} by {manifest.medium}: {reason}")
        self.version = manifest.version
        self.medium = manifest.medium


class WeightsGone(WeightsError):
    """Error: the publisher has retired the version or has ended. The newest manifest may work."""


class WeightsTimeout(WeightsError, TimeoutError):
    """Error: weights were not complete by the deadline."""


ALIGNMENT = 64
"""Tensors start at multiples of this many bytes in a buffer."""
Buffer = np.ndarray[Any, np.dtype[np.uint8]]


def compute_layout(
    tensors: Mapping[str, Tensor], known: Mapping[str, str] = {}
) -> tuple[tuple[TensorSlot, ...], int]:
    """Compute the location of each tensor in a buffer, in the given order, and its digest.

    known: Digests of tensors that have not changed, which are not computed again. Returns the slots
    and the size of the buffer in bytes, at least ALIGNMENT. Raises ValueError for a dtype without a
    tag, and for the one name that safetensors files reserve.
    """
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be called '__metadata__'")
    slots: list[TensorSlot] = []
    end = 0
    digester = TensorDigester()
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        tag = dtype_tag(tensor.dtype)
        digest = known.get(name) or digester.digest(tensor)
        slots.append(TensorSlot(name, tag, tuple(tensor.shape), end, nbytes, digest))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots), end or ALIGNMENT


def pack(tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], buffer: Buffer) -> None:
    """Copy tensors, from any device and with any strides, into a zeroed buffer."""
    for slot, view in zip(slots, _views(slots, buffer), strict=True):
        view.copy_(tensors[slot.name].detach())


def unpack(manifest: WeightsManifest, buffer: Buffer) -> dict[str, Tensor]:
    """Return the tensors by name, as views of a buffer, which they keep alive.

    Raises WeightsError if the size or the checksum differs from the manifest. The checksum of a
    sealed memory file is not computed, because its bytes cannot have changed.
    """
    if len(buffer) != manifest.nbytes:
        raise WeightsError(manifest, f"{len(buffer)} bytes, the manifest says {manifest.nbytes}")
    actual = manifest.digest if manifest.medium == "shm" else checksum(buffer)
    if actual != manifest.checksum:
        raise WeightsError(manifest, f"checksum {actual}, the manifest says {manifest.checksum}")
    views = _views(manifest.slots, buffer)
    return {slot.name: view for slot, view in zip(manifest.slots, views, strict=True)}


def checksum(buffer: Buffer) -> str:
    """Return the BLAKE2b checksum of a buffer, 16 bytes as hex digits."""
    return hashlib.blake2b(memoryview(cast(Any, buffer)), digest_size=16).hexdigest()


def check_manifest(manifest: WeightsManifest) -> None:
    """Raise WeightsError if the slots are inconsistent with each other or with the size of the
    buffer."""
    if manifest.version < 0 or manifest.nbytes < ALIGNMENT:
        raise WeightsError(manifest, f"a manifest of {manifest.nbytes} bytes")
    end = 0
    for slot in manifest.slots:
        if slot.dtype not in ITEMSIZE or any(size < 0 for size in slot.shape):
            raise WeightsError(
                manifest, f"tensor {slot.name!r}: type {slot.dtype!r}, shape {slot.shape}"
            )
        if slot.nbytes != math.prod(slot.shape) * ITEMSIZE[slot.dtype]:
            raise WeightsError(
                manifest, f"tensor {slot.name!r}: {slot.nbytes} bytes do not fit shape {slot.shape}"
            )
        if (
            slot.offset % ALIGNMENT
            or slot.offset < end
            or slot.offset + slot.nbytes > manifest.nbytes
        ):
            raise WeightsError(
                manifest, f"tensor {slot.name!r} lies at {slot.offset} of {manifest.nbytes} bytes"
            )
        end = slot.offset + slot.nbytes
    if len({slot.name for slot in manifest.slots}) != len(manifest.slots):
        raise WeightsError(manifest, "a tensor occurs twice")


def _views(slots: tuple[TensorSlot, ...], buffer: Buffer) -> list[Tensor]:
    import torch

    flat = torch.from_numpy(buffer)
    views: list[Tensor] = []
    for slot in slots:
        dtype = getattr(torch, TORCH_NAMES[slot.dtype])
        if slot.nbytes:
            views.append(
                flat[slot.offset : slot.offset + slot.nbytes].view(dtype).reshape(slot.shape)
            )
        else:
            views.append(torch.empty(slot.shape, dtype=dtype))
    return views


class MemoryFile:
    """Sealed memory file with one version's weights. Raises OSError if the system is out of
    memory."""

    def __init__(
        self, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int
    ) -> None:
        self.checksum = joint_digest({slot.name: slot.digest for slot in slots})
        self._descriptor = os.memfd_create("realhf-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocating here turns a lack of memory into an error; in the mapping below it would be
            # a signal.
            os.posix_fallocate(self._descriptor, 0, nbytes)
            _fill(self._descriptor, tensors, slots, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.location = (
            f"{os.getpid()}:{self._descriptor}:{os.fstat(self._descriptor).st_ino}:{host_token()}"
        )

    def close(self) -> None:
        """Close the file. Receivers that have opened it keep its memory as long as their tensors
        exist."""
        os.close(self._descriptor)


def _fill(
    descriptor: int, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int
) -> None:
    mapping = mmap.mmap(descriptor, nbytes)
    buffer: Buffer = np.frombuffer(mapping, dtype=np.uint8)
    try:
        pack(tensors, slots, buffer)
    finally:
        # Sealing fails as long as a writable mapping exists.
        del buffer
        mapping.close()


def read_memory_file(manifest: WeightsManifest) -> Buffer:
    """Map the buffer of a manifest copy-on-write. Raises WeightsGone, WeightsError."""
    try:
        *numbers, host = manifest.location.split(":", 3)
        pid, number, inode = (int(part) for part in numbers)
    except ValueError:
        raise WeightsError(
            manifest, f"location {manifest.location!r:.80} is not pid:descriptor:inode:host"
        ) from None
    if host != host_token():
        raise WeightsError(
            manifest,
            "its publisher is on another host, which memory does not reach; set "
            "async_rl.weights=fetch (or disk)",
        )
    path = f"/proc/{pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        raise WeightsGone(manifest, f"process {pid} of this host no longer has it") from None
    except OSError as error:
        raise WeightsError(manifest, f"cannot open {path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != inode:
            raise WeightsGone(manifest, f"process {pid} of this host no longer has it")
        if status.st_size != manifest.nbytes:
            raise WeightsError(
                manifest, f"{status.st_size} bytes, the manifest says {manifest.nbytes}"
            )
        return np.frombuffer(
            mmap.mmap(descriptor, manifest.nbytes, access=mmap.ACCESS_COPY), dtype=np.uint8
        )
    except OSError as error:
        raise WeightsError(manifest, f"cannot map {path}: {error}") from None
    finally:
        os.close(descriptor)


SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "u8": "U8",
    "i16": "I16",
    "i32": "I32",
    "i64": "I64",
    "f16": "F16",
    "bf16": "BF16",
    "f32": "F32",
    "f64": "F64",
}
"""Name of each dtype in safetensors files, by our dtype tag."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size in bytes of a header in the safetensors format."""
NAME = re.compile(
    r"(?P<owner>.+)\.(?P<host>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d+)\.v\d+\.[0-9a-f]{8}"
    r"\.safetensors(\.partial)?"
)
"""File name pattern of a version: owner (run and worker), digest of the host, process, version,
checksum."""


class WeightFile:
    """Safetensors file with one version's weights. Raises OSError if it cannot be written; no part
    of it remains then."""

    def __init__(
        self, folder: Path, stem: str, version: int, slots: tuple[TensorSlot, ...], buffer: Buffer
    ) -> None:
        self.checksum = checksum(buffer)
        self._path = folder.resolve() / f"{stem}.v{version}.{self.checksum[:8]}.safetensors"
        self.location = str(self._path)
        with atomic_file(self._path) as partial, partial.open("wb") as file:
            _write_safetensors(file, version, slots, buffer)

    def close(self) -> None:
        """Remove the file. A receiver that has opened it can still read all of it."""
        self._path.unlink(missing_ok=True)


def file_stem(run_id: str, worker: str) -> str:
    """Return the prefix of the names of the files that this process writes."""
    return f"{_owner(run_id, worker)}.{_host_digest()}.{os.getpid()}.{start_time(os.getpid())}"


def sweep(folder: Path, run_id: str, worker: str) -> list[str]:
    """Remove the files of publishers that have ended; return their names."""
    removed: list[str] = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        is_own_host = match["host"] == _host_digest()
        alive = is_own_host and start_time(int(match["pid"])) == int(match["started"])
        if not alive and (is_own_host or match["owner"] == _owner(run_id, worker)):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _owner(run_id: str, worker: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{run_id}-{worker}")


def _host_digest() -> str:
    return hashlib.blake2b(host_token().encode(), digest_size=4).hexdigest()


def _write_safetensors(
    file: BinaryIO, version: int, slots: tuple[TensorSlot, ...], buffer: Buffer
) -> None:
    # The widest elements come first, as in the format's own writers, so that every tensor is
    # aligned in a mapped file.
    ordered = sorted(slots, key=lambda slot: -ITEMSIZE[slot.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version)}}
    end = 0
    for slot in ordered:
        header[slot.name] = {
            "dtype": SAFETENSORS_NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.nbytes],
        }
        end += slot.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for slot in ordered:
        file.write(memoryview(cast(Any, buffer[slot.offset : slot.offset + slot.nbytes])))


def read_weight_file(manifest: WeightsManifest) -> Buffer:
    """Read the buffer of a manifest from its file. Raises WeightsGone, WeightsError."""
    buffer: Buffer = np.zeros(manifest.nbytes, dtype=np.uint8)
    try:
        with open(manifest.location, "rb") as file:
            header, start = _read_header(manifest, file)
            for slot in manifest.slots:
                begin, end = _tensor_range(manifest, header, slot)
                file.seek(start + begin)
                target = memoryview(cast(Any, buffer[slot.offset : slot.offset + slot.nbytes]))
                if end - begin != slot.nbytes or file.readinto(target) != slot.nbytes:
                    raise WeightsError(
                        manifest, f"tensor {slot.name!r} is not complete in {manifest.location}"
                    )
    except FileNotFoundError:
        raise WeightsGone(manifest, f"{manifest.location} no longer exists") from None
    except OSError as error:
        raise WeightsError(manifest, f"cannot read {manifest.location}: {error.strerror}") from None
    return buffer


def _read_header(manifest: WeightsManifest, file: BinaryIO) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise WeightsError(manifest, f"{manifest.location} has a header of {size} bytes")
    try:
        header = json.loads(file.read(size))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise WeightsError(manifest, f"{manifest.location} is not a safetensors file")
    return header, 8 + size


def _tensor_range(
    manifest: WeightsManifest, header: dict[str, Any], slot: TensorSlot
) -> tuple[int, int]:
    try:
        entry = header[slot.name]
        same = entry["dtype"] == SAFETENSORS_NAMES[slot.dtype] and entry["shape"] == list(
            slot.shape
        )
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise WeightsError(manifest, f"{manifest.location} lacks tensor {slot.name!r}") from None
    if not same or begin < 0 or end > manifest.nbytes:
        raise WeightsError(manifest, f"{manifest.location} has another tensor {slot.name!r}")
    return begin, end


BASE_S = 10.0
"""Seconds that a transfer may take in addition to the time for its bytes."""
SLOWEST_BYTES_PER_S = 20e6
"""Transfer rate in bytes per second below which a transfer counts as stuck."""


def compute_transfer_timeout_s(nbytes: int) -> float:
    """Return the seconds after which a transfer of this size counts as stuck."""
    return BASE_S + nbytes / SLOWEST_BYTES_PER_S


def compute_staging_s(nbytes: int) -> float:
    """Return the seconds that a version of this size adds to a receiver's deadline.

    The factor 2: a transfer to others may be in progress before the receiver's own.
    """
    return 2 * nbytes / SLOWEST_BYTES_PER_S


GONE = "no longer holds it"
"""Part of a server's error message about a retired version (``realhf.transport.bulk``)."""
TICKET_BYTES = 16
"""Size of the random number by which a version is requested."""
MAX_CONNECTIONS = 1024
"""Maximum number of connections to a publisher. Each engine opens ``LANES``, all at the same
time."""
MAX_ATTEMPTS = 20
"""Maximum number of attempts to fetch a piece."""
PAUSE_S = (0.05, 0.3)
"""Range of the random pause between attempts, in seconds."""


def _tls(network: Network) -> RunTls | None:
    return RunTls(network.keys, trusted=network.trusted) if network.keys is not None else None


class WeightServer:
    """Server from which other hosts fetch weights in pieces. ``buffers`` maps tickets to the
    buffers to serve.

    Connections are encrypted if the run has keys. Raises DataError if the server cannot listen on
    the address.
    """

    def __init__(self, network: Network) -> None:
        self.buffers: dict[bytes, Buffer] = {}
        self._bulk = BulkServer(
            "weights",
            network,
            _tls(network),
            self._piece,
            max_connections=MAX_CONNECTIONS,
            max_unauthenticated=MAX_CONNECTIONS // 4,
        )
        self._bulk.start()
        self.endpoint = f"{network.advertised}:{self._bulk.port}"

    def close(self) -> None:
        """Stop serving and release the port."""
        self._bulk.close()
        self.buffers.clear()

    def _piece(self, ticket: bytes, frame: int, start: int, length: int) -> memoryview | None:
        buffer = self.buffers.get(ticket)
        if buffer is None:
            return None
        if frame or not 0 < length <= len(buffer) - start:
            raise ProtocolError(f"bytes {start} to {start + length} of {len(buffer)}")
        return memoryview(cast(Any, buffer))[start : start + length]


class ServedVersion:
    """A version that a WeightServer serves. Its buffer must not be changed any more."""

    def __init__(self, server: WeightServer, buffer: Buffer) -> None:
        self.checksum = checksum(buffer)
        self._server = server
        self._ticket = secrets.token_bytes(TICKET_BYTES)
        server.buffers[self._ticket] = buffer
        self.location = f"{server.endpoint}#{self._ticket.hex()}"

    def close(self) -> None:
        """Stop serving the version. Pieces in flight still arrive."""
        self._server.buffers.pop(self._ticket, None)


def read_served(manifest: WeightsManifest, timeout_s: float, network: Network) -> Buffer:
    """Fetch the buffer of a manifest over the network.

    Raises WeightsGone if the publisher has retired the version or cannot be reached, WeightsTimeout
    if nothing arrives for ``timeout_s`` seconds or the whole transfer takes too long, and
    WeightsError for an invalid location or answer.
    """
    endpoint, _, ticket = manifest.location.partition("#")
    host, _, port = endpoint.rpartition(":")
    try:
        number = bytes.fromhex(ticket)
        port_number = int(port)
        if (
            len(number) != TICKET_BYTES
            or not host
            or (network.keys is None and not is_loopback_host(host))
        ):
            raise ValueError("no process of this run listens there")
        tls = _tls(network)
    except (ValueError, NetworkError) as error:
        raise WeightsError(manifest, f"location {manifest.location!r:.80}: {error}") from None
    whole_s = timeout_s + max(
        compute_staging_s(manifest.nbytes), compute_transfer_timeout_s(manifest.nbytes)
    )
    lanes = [BulkConnection(tls, host, port_number) for _ in range(LANES)]
    last_progress = process_clock.now()
    deadline = last_progress + whole_s

    def ask(lane: int, piece: Piece, into: memoryview) -> None:
        nonlocal last_progress
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                lanes[lane].fetch(number, piece, into, deadline)
                last_progress = process_clock.now()
                return
            except PeerLost as error:
                if process_clock.now() - last_progress > timeout_s:
                    raise FetchTimeout(str(error)) from None
                # A refused connection has no listener, a refused certificate is of another run.
                if not attempts_left or "refused" in str(error):
                    raise
                # All engines connect at the same time, so the server may be full for a moment.
                time.sleep(random.uniform(*PAUSE_S))

    try:
        return np.frombuffer(fetch_whole(manifest.nbytes, ask), dtype=np.uint8)
    except FetchTimeout as error:
        text = (
            f"{endpoint} sent nothing for {timeout_s:g} s, or not everything within {whole_s:g} s "
            f"({error})"
        )
        raise WeightsTimeout(manifest, text) from None
    except PeerLost as error:
        raise WeightsGone(
            manifest, f"no process serves it at {endpoint}, or the connection broke: {error}"
        ) from None
    except DataError as error:
        if GONE in str(error):
            raise WeightsGone(manifest, "its publisher serves it no more") from None
        raise WeightsError(manifest, f"{endpoint} is not its publisher: {error}") from None
    finally:
        for lane in lanes:
            lane.close()


KEPT_VERSIONS = 2
"""Number of versions that a publisher keeps; older ones are retired."""
Medium = Literal["shm", "disk", "fetch"]
_Storage = MemoryFile | WeightFile | ServedVersion


class WeightPublisher:
    """Publisher of one policy's weight versions. It keeps the last two; each is either complete or
    absent.

    Medium ``shm`` reaches the processes of this host, ``disk`` every host that has ``folder`` under
    the same path (no other medium uses ``folder``), ``fetch`` every process of the run that reaches
    ``network``. Not thread-safe. Raises ValueError for an unknown medium.
    """

    def __init__(
        self,
        run_id: str,
        worker: str,
        folder: Path,
        medium: Medium = "shm",
        *,
        network: Network = LOOPBACK,
    ) -> None:
        if medium not in get_args(Medium):
            raise ValueError(f"medium {medium!r} of weights, one of {', '.join(get_args(Medium))}")
        self._medium: Medium = medium
        self._folder = folder
        self._stem = file_stem(run_id, worker)
        self._versions: dict[int, tuple[_Storage, WeightsManifest]] = {}
        self._last = -1
        self._announced: WeightsManifest | None = None
        self._server = WeightServer(network) if medium == "fetch" else None
        if medium == "disk":
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder, run_id, worker)

    @property
    def latest(self) -> WeightsManifest | None:
        """Manifest of the newest available version, for a worker that joins late; None if there is
        none."""
        return self._versions[max(self._versions)][1] if self._versions else None

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        trial: int = 0,
        changed: Collection[str] = (),
    ) -> WeightsManifest:
        """Copy tensors (any device, any strides) and make them available; retire all but the last
        two versions.

        trial: Step of the self-test, which replaces the last version; only ``changed`` tensors
        differ from it. Raises ValueError if the version is not above the last one (in a trial, or
        if that was announced: is below it), or if a tensor cannot be sent, and OSError if the
        medium is full. Nothing is published then.
        """
        announced = self._announced is not None and self._announced.version == self._last
        repeats = trial > 0 or announced
        slots, nbytes = self._lay_out(
            version, tensors, repeats, self.latest if trial else None, changed
        )
        published = self._store(version, tensors, slots, nbytes)
        manifest = WeightsManifest(
            version, self._medium, published.location, nbytes, published.checksum, slots, trial
        )
        self.retire(version)
        self._versions[version] = (published, manifest)
        self._last = version
        for old in sorted(self._versions)[:-KEPT_VERSIONS]:
            self.retire(old)
        return manifest

    def announce(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        trial: int = 0,
        changed: Collection[str] = (),
    ) -> WeightsManifest:
        """Describe tensors as medium ``nccl`` without copying them: the trainer's GPU sends them by
        itself. Versions that were published before are retired. Arguments and errors are those of
        ``publish``."""
        before = self._announced if trial else None
        slots, nbytes = self._lay_out(version, tensors, trial > 0, before, changed)
        for old in list(self._versions):
            self.retire(old)
        self._last = version
        digest = joint_digest({slot.name: slot.digest for slot in slots})
        self._announced = WeightsManifest(version, "nccl", "", nbytes, digest, slots, trial)
        return self._announced

    def _lay_out(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        repeats: bool,
        before: WeightsManifest | None,
        changed: Collection[str],
    ) -> tuple[tuple[TensorSlot, ...], int]:
        """Return where the tensors of a version stand and their size in bytes. Digests of tensors
        that are not ``changed`` since ``before`` are taken from there. Raises ValueError if the
        version is not above the last one, or below it if it ``repeats`` that."""
        if version < self._last + (not repeats):
            raise ValueError(f"weights version {version} after version {self._last}")
        slots = before.slots if before is not None else ()
        known = {slot.name: slot.digest for slot in slots if slot.name not in changed}
        return compute_layout(tensors, known)

    def _store(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        slots: tuple[TensorSlot, ...],
        nbytes: int,
    ) -> _Storage:
        if self._medium == "shm":
            return MemoryFile(tensors, slots, nbytes)
        buffer: Buffer = np.zeros(nbytes, dtype=np.uint8)
        pack(tensors, slots, buffer)
        if self._medium == "disk":
            return WeightFile(self._folder, self._stem, version, slots, buffer)
        assert self._server is not None
        return ServedVersion(self._server, buffer)

    def retire(self, version: int) -> None:
        """Stop serving a version. Receivers that are already reading it can finish. Unknown
        versions are ignored."""
        published, _ = self._versions.pop(version, (None, None))
        if published is not None:
            published.close()

    def close(self) -> None:
        """Retire all versions, and stop the server if there is one."""
        for version in list(self._versions):
            self.retire(version)
        if self._server is not None:
            self._server.close()
            self._server = None


def receive(
    manifest: WeightsManifest, timeout_s: float, network: Network = LOOPBACK
) -> dict[str, Tensor]:
    """Return the tensors of a manifest by name, on the CPU, complete and verified (sizes, then
    checksum).

    They share memory with no other process, so writing to them is safe. Medium ``fetch`` uses the
    keys of ``network``. ``timeout_s`` is the maximum number of seconds without progress, and is
    added to the limit for the whole transfer. Raises WeightsGone if the version is no longer
    available, WeightsTimeout, and WeightsError if the weights or the manifest are damaged.
    """
    check_manifest(manifest)
    if manifest.medium == "shm":
        buffer = read_memory_file(manifest)
    elif manifest.medium == "disk":
        buffer = read_weight_file(manifest)
    elif manifest.medium == "fetch":
        buffer = read_served(manifest, timeout_s, network)
    else:
        raise WeightsError(manifest, "no such medium")
    return unpack(manifest, buffer)
