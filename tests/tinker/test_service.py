"""The order of promises, what is owed, and what the server does where something fails. The process
that computes is one that answers when a test says so; none of it needs the client."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import weakref
from collections import namedtuple
from pathlib import Path

import pytest

from realhf.tinker.channel import (
    Began,
    Channel,
    ComputeReply,
    Create,
    Drop,
    Forward,
    Load,
    Save,
    Spoil,
    Unload,
    Update,
)
from realhf.tinker.service import GAP_TIMEOUT_CLEANS, MAX_SEQ_AHEAD
from realhf.tinker.store import FAILED, FINISHED, WAITING
from realhf.web.refusal import Refusal

ME = "me"
OPTIONS = {"base": "b", "rank": 4, "seed": 0, "mlp": True, "attention": True, "unembedding": True}


def model_of(service, number=0) -> str:
    """A model that is made."""
    if service.store.session("s") is None:
        service.store.add_session("s", ME, {})
    model = f"s:train:{number}"
    service.submit(ME, "create_model", model, 0, b"{}", ("s", OPTIONS))
    service._process.answer()
    return model


def states(service, model) -> list[int]:
    return [state for _, state in service.store.request_states(model, 0)]


def ask(service, model, seq, asked="forward_backward", /, **said) -> str:
    return service.submit(ME, asked, model, seq, json.dumps(said).encode())


# ---- a number that never comes


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_what_waits_for_a_request_that_never_comes_fails_with_the_session(
    opened, restarted, finished
):
    """The client sends the first part of a batch last. Killed in between, it left the others in
    work for ever: they counted towards the quota of its key, and of all, also after a restart."""
    service = opened()
    model = model_of(service)
    for seq in (2, 3):
        ask(service, model, seq)
    if restarted:
        service = opened()
        assert service._pending[ME][0] == 2
    service.unload_lapsed()
    assert states(service, model) == [WAITING] * 2
    if finished:
        service.store.touch_session("s", finished=True)
    else:
        service.store._base.execute("update sessions set seen=0")
    service.unload_lapsed()
    late = service.store.request(f"{model}:3")
    assert (late.state, late.error) == (FAILED, "an earlier request never arrived")
    assert service._pending[ME] == (0, 0)
    ask(service, model, 1)
    service._process.answer(len(service._process.jobs))
    assert states(service, model) == [FINISHED, FAILED, FAILED], "they were done again"


@pytest.mark.parametrize("restarted", [False, True])
def test_what_waits_for_a_request_that_never_comes_is_done_in_the_end(opened, restarted):
    """A client that lives on kept its session alive, and what it had sent behind a lost request
    waited for ever. A step may miss the gradient of what was lost."""
    service = opened()
    model = model_of(service)
    ask(service, model, 2, "optim_step", params={})
    if restarted:
        service = opened()
    for _ in range(GAP_TIMEOUT_CLEANS - 1):
        service.close_gaps()
    assert states(service, model) == [WAITING]
    service.close_gaps()
    if restarted:
        service._process.answer()
    assert [type(work) for work in service._process.works] == [Spoil, Update]
    assert "request 1 never arrived" in service._process.works[0].why
    service._process.answer(2)
    assert states(service, model) == [FAILED, FINISHED]
    with pytest.raises(Refusal, match=r"number 1 of .* is taken: request 1 never arrived"):
        ask(service, model, 1)


def test_a_request_that_is_refused_for_now_is_waited_for(opened, monkeypatch):
    """Its number was given up after ten minutes of a full disk, in which the client had sent it
    again and again."""
    service = opened()
    model = model_of(service)
    ask(service, model, 2)
    for _ in range(GAP_TIMEOUT_CLEANS):
        service.close_gaps()
        with monkeypatch.context() as full:
            full.setattr(
                service,
                "check_disk",
                lambda: (_ for _ in ()).throw(Refusal(507, "the disk is full")),
            )
            with pytest.raises(Refusal, match="the disk is full"):
                ask(service, model, 1)
    ask(service, model, 1)
    service._process.answer(2)
    assert states(service, model) == [FINISHED] * 2


def test_gaps_that_are_closed_load_no_more_models_than_there_may_be(opened):
    """Every model of which a request had waited came into memory at the same cleaning."""
    service = opened(max_adapters=2)
    models = [model_of(service, number) for number in range(4)]
    waiting = []
    for model in models:
        waiting.append(ask(service, model, 2))
        service._process.answer(len(service._process.jobs))
    for _ in range(GAP_TIMEOUT_CLEANS):
        service.close_gaps()
    for _ in models:
        assert len(service._loaded) == 2
        service._process.answer(len(service._process.jobs))
        service.close_gaps()
    service._process.answer(len(service._process.jobs))
    assert [service.store.request(name).state for name in waiting] == [FINISHED] * 4


def test_numbers_of_refused_requests_that_are_far_ahead_take_no_memory(opened):
    """Nothing bounded how many of them a model held, of any number."""
    service = opened()
    model = model_of(service)
    for seq in (2, MAX_SEQ_AHEAD + 1, MAX_SEQ_AHEAD + 2, 1 << 30):
        service.skip(ME, model, seq, "no", "optim_step")
    assert [*service._queued[model]] == [2, MAX_SEQ_AHEAD + 1]


def test_a_pass_that_failed_spoils_the_step_also_after_a_restart(opened):
    service = opened()
    model = model_of(service)
    for seq in (1, 2):
        ask(service, model, seq)
    service._process.answer(error="datum 3: no", theirs=True)
    service._process.answer()
    ask(service, model, 3, "optim_step", params={})
    service = opened()
    service._process.answer()
    works = service._process.works
    assert works == [Spoil(model, "datum 3: no"), Forward(model), Update(model, {}, works[-1].keep)]


def test_what_waits_for_a_model_that_is_forgotten_fails(opened):
    service = opened()
    model = model_of(service)
    ask(service, model, 3)
    service.submit(ME, "unload_model", model, 1, b"{}")
    service._process.answer()
    assert states(service, model) == [FINISHED, FAILED] and service._pending[ME] == (0, 0)


def test_nothing_that_was_asked_of_a_forgotten_model_is_kept(opened):
    """Bodies behind its last kept state stayed on the disk for ever."""
    service = opened()
    model = model_of(service)
    ask(service, model, 1)
    service.submit(ME, "unload_model", model, 2, b"{}")
    service._process.answer(2)
    assert [each.body for each in service.store.history(model, -1)] == [b"", b"", b""]


@pytest.mark.parametrize("restarted", [False, True])
def test_the_first_of_a_batch_is_taken_when_the_others_have_filled_the_quota(opened, restarted):
    """It was not after a restart, which had forgotten what waits for it."""
    service = opened(max_pending=2)
    model = model_of(service)
    for seq in (2, 3):
        ask(service, model, seq)
    if restarted:
        service = opened(max_pending=2)
    with pytest.raises(Refusal, match="--max-pending"):
        ask(service, model, 4)
    ask(service, model, 1)
    assert service._process.works[-3:] == [Forward(model)] * 3


def test_a_number_that_is_skipped_lets_those_go_on_that_wait_on_the_disk(opened):
    service = opened()
    model = model_of(service)
    ask(service, model, 2)
    service = opened()
    assert not service._process.jobs, "there is a gap"
    service.skip(ME, model, 1, "too large")
    assert [type(work) for work in service._process.works] == [Create, Spoil, Forward]


def test_a_model_that_is_refused_is_not_written_down(opened):
    """It was, and was listed."""
    service = opened(max_adapters_per_key=1)
    busy = model_of(service)
    ask(service, busy, 1)
    with pytest.raises(Refusal, match="--max-adapters-per-key"):
        model_of(service, 1)
    assert [row.id for row in service.store.models(ME)] == [busy]
    service._process.answer()
    assert service.store.model(model_of(service, 1)) is not None


def test_nothing_is_left_of_a_sample_that_is_cancelled(opened):
    """Its bytes counted for ever, and so did its job."""
    service = opened()
    service.store.add_sampler("s:sample:0", ME, "s", "", "")
    service.cancel(ME, service.submit(ME, "sample", "s:sample:0", 0, b"body"))
    assert service._pending[ME] == (0, 0) and not service._job_of and not service._jobs


def test_a_channel_ends_with_the_other_side():
    """Each time the process that computes died, a thread and a socket stayed."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    channel = Channel(ours, ComputeReply, lambda *told: None, ended.set)
    channel.start()
    theirs.close()
    assert ended.wait(10)
    for thread in (channel._receiver, channel._sender):
        thread.join(10)
        assert not thread.is_alive()
    connection = weakref.ref(channel._connection)
    del channel
    assert connection() is None


# ---- weights that have a path


def save(service, model, seq, name="a", *, overwrite=False, kind="training") -> str:
    """Ask for weights of a name, in a folder as the checkpoint store names it."""
    folder = service.checkpoints.new_folder(model, kind, name, seq)
    said = {
        "path": f"tinker://{model}/weights/{name}",
        "name": name,
        "kind": kind,
        "folder": str(folder),
    }
    return ask(
        service, model, seq, "save_weights", **said, overwrite=overwrite, expires=None, info={}
    )


def answer_saves(service, nbytes=1.0) -> None:
    """Write what is asked for, and answer."""
    while service._process.jobs:
        work = service._process.works[0]
        if isinstance(work, Save):
            Path(work.folder).mkdir(parents=True)
        service._process.answer(numbers={"size_bytes": nbytes})


def test_of_two_saves_under_one_name_the_second_fails(opened):
    """Sent without waiting in between both succeeded, and the second removed the folder of the
    first."""
    service = opened()
    model = model_of(service)
    first = save(service, model, 1)
    second = save(service, model, 2)
    answer_saves(service)
    assert service.store.request(first).state == FINISHED
    assert "pass overwrite" in service.store.request(second).error
    row = service.store.checkpoint(f"tinker://{model}/weights/a")
    assert row.info["folder"].endswith("a.1") and Path(row.info["folder"]).is_dir()


def test_weights_are_loaded_that_were_saved_just_before(opened):
    """The load had looked for them when it came, and carried the folder of those that were
    replaced."""
    service = opened()
    model = model_of(service)
    save(service, model, 1)
    answer_saves(service)
    save(service, model, 2, overwrite=True)
    ask(service, model, 3, "load_weights", path=f"tinker://{model}/weights/a", optimizer=True)
    ask(service, model, 4)
    assert [type(work) for work in service._process.works] == [Save]
    Path(service._process.works[0].folder).mkdir()
    service._process.answer(numbers={"size_bytes": 1.0})
    load, behind = service._process.works
    assert load.folder.endswith("a.2") and isinstance(behind, Forward)


def test_a_load_is_done_again_with_what_it_took(opened):
    """Where its state could not be kept. The name may stand for other weights by then."""
    service = opened()
    model = model_of(service)
    save(service, model, 1)
    answer_saves(service)
    ask(service, model, 2, "load_weights", path=f"tinker://{model}/weights/a", optimizer=True)
    save(service, model, 3, overwrite=True)
    answer_saves(service)
    ask(service, model, 4)
    load = opened()._process.works[1]
    assert load == Load(model, load.folder, True) and load.folder.endswith("a.1")


def test_a_load_that_failed_is_not_done_again(opened):
    """After a kill it may succeed, and the model has other weights then."""
    service = opened()
    model = model_of(service)
    save(service, model, 1)
    answer_saves(service)
    ask(service, model, 2, "load_weights", path=f"tinker://{model}/weights/a", optimizer=True)
    service._process.answer(error="out of memory")
    ask(service, model, 3)
    service = opened()
    assert [type(work) for work in service._process.works] == [Create, Forward]


def test_saves_that_are_sent_without_waiting_have_their_quota(opened):
    """Those in work did not count, and so many could be sent at once as requests may be in work."""
    service = opened(max_saved_gib=1e-3)
    model = model_of(service)
    sent = [save(service, model, seq, f"number-{seq}") for seq in (1, 2, 3)]
    answer_saves(service, 1.5 * 2**20)
    assert [service.store.request(name).state for name in sent] == [FINISHED, FAILED, FAILED]
    assert "--max-saved-gib" in service.store.request(sent[1]).error
    service = opened(min_free_gib=1e9)
    with pytest.raises(Refusal, match="--min-free-gib"):
        service.check_saving(ME, "training")


def test_a_whole_model_counts_as_the_base_while_it_is_saved(opened):
    """Each of the models of a key may save one at the same time."""
    service = opened(max_saved_gib=1e-3)
    for model in [model_of(service, number) for number in range(2)]:
        save(service, model, 1, kind="external")
    assert [work.model for work in service._process.works] == ["s:train:0"]
    assert "--max-saved-gib" in service.store.request("s:train:1:1").error


def test_weights_that_train_whole_count_before_they_are_saved(opened):
    """600 KiB for a sampler and three times as much with the moments, of 1 MiB and 5 GiB."""
    service = opened(max_saved_gib=1e-3, full_weights=True)
    service.check_saving(ME, "sampler")
    with pytest.raises(Refusal, match="--max-saved-gib"):
        service.check_saving(ME, "training")


def test_a_state_that_the_disk_has_no_room_for_is_not_kept(opened, monkeypatch):
    service = opened(full_weights=True, state_every_s=0.0)
    model = model_of(service)
    usage = namedtuple("usage", "free")
    for free, kept in ((2**30 + (1900 << 10), True), (2**30 + (1700 << 10), False)):
        monkeypatch.setattr(
            "realhf.tinker.service.shutil.disk_usage", lambda root, free=free: usage(free)
        )
        assert bool(service._choose_keep(model, 1)) == kept


# ---- a model that is made again


def trained(opened):
    """A model with a pass and a step that are done, and a pass that is owed; a new process has to
    make it again."""
    service = opened()
    model = model_of(service)
    ask(service, model, 1)
    ask(service, model, 2, "optim_step", params={})
    service._process.answer(2)
    ask(service, model, 3)
    return opened(), model


def test_a_model_that_is_not_made_again_fails_aloud(opened):
    """It went on with other weights: that something was not done again only stood in the log."""
    service, model = trained(opened)
    assert [job.again for job in service._process.jobs] == [True, True, True, False]
    service._process.answer()
    service._process.answer(error="out of memory")
    rest = service._process.works[:2]
    again = service._process.works[2:]
    assert rest == [Update(model, {}), Forward(model)]
    assert [type(work) for work in again] == [Unload, Create, Forward, Update, Forward]
    service._process.answer(2)  # they belong to the first try, and change nothing
    assert states(service, model) == [FINISHED] * 2 + [WAITING]
    service._process.answer(3)
    service._process.answer(error="out of memory")
    assert states(service, model) == [FINISHED] * 2 + [FAILED] and service._pending[ME] == (0, 0)
    assert service.store.request(f"{model}:3").error == "the model was not rebuilt: out of memory"
    service._process.jobs.clear()
    ask(service, model, 4)
    assert [type(work) for work in service._process.works] == [
        Create,
        Forward,
        Update,
        Spoil,
        Forward,
    ]
    service._process.answer(5)
    assert states(service, model) == [FINISHED] * 2 + [FAILED, FINISHED]


def test_a_model_that_is_made_again_at_the_second_try_goes_on(opened):
    service, model = trained(opened)
    service._process.answer(error="out of memory")
    service._process.answer(len(service._process.jobs))
    assert states(service, model) == [FINISHED] * 3


def test_weights_that_are_gone_are_no_reason_to_go_on_without(opened):
    """A load of before this was written down may find nothing where it is done again."""
    service = opened()
    model = model_of(service)
    save(service, model, 1)
    answer_saves(service)
    ask(service, model, 2, "load_weights", path=f"tinker://{model}/weights/a", optimizer=True)
    answer_saves(service)
    service.store._base.execute("update requests set info='{}'")
    service.checkpoints.delete(service.checkpoints.find(ME, f"tinker://{model}/weights/a"))
    ask(service, model, 3)
    service = opened()
    assert "was not rebuilt: there are no weights" in service.store.request(f"{model}:3").error


def test_a_step_that_failed_drops_its_gradients_also_where_it_is_done_again(opened):
    """One during which the process died was left out, and its gradients came into the next step;
    one that failed for want of memory was made."""
    service = opened()
    model = model_of(service)
    for seq in (1, 3):
        ask(service, model, seq)
        ask(service, model, seq + 1, "optim_step", params={})
    service._process.answer()
    service._process.answer(error="out of memory")
    service._process.answer(1)
    for _ in range(2):
        service._process.answer(len(service._process.jobs) - 1)
        service._process.told(Began(service._process.jobs[0].number), b"")
        service._process.lost(-9)
    assert states(service, model) == [FINISHED, FAILED, FINISHED, FAILED]
    assert "during this request" in service.store.request(f"{model}:4").error
    ask(service, model, 5)
    assert [type(work) for work in service._process.works] == [
        Create,
        Forward,
        Drop,
        Forward,
        Drop,
        Forward,
    ]


# ---- where the server itself fails


def broken(*given, **named):
    raise sqlite3.OperationalError("disk I/O error")


def test_housekeeping_goes_on_after_an_error_of_the_disk(opened, monkeypatch, caplog):
    """It ended at the first one, without a word."""
    monkeypatch.setattr("realhf.tinker.service.CLEAN_INTERVAL_S", 0.001)
    service = opened()
    monkeypatch.setattr(service.store, "drop_results", broken)

    async def cleaned() -> None:
        while caplog.text.count("was not cleaned: disk I/O error") < 2:
            await asyncio.sleep(0.001)

    service._loop.run_until_complete(asyncio.wait_for(cleaned(), 10))


@pytest.mark.parametrize("error", [sqlite3.OperationalError, OSError, KeyError])
def test_an_error_in_what_nobody_waits_for_ends_the_server(opened, monkeypatch, error):
    """It was lost in the event loop, and whoever waited for the answer waited for ever."""

    def fails(*given, **named):
        raise error("no more")

    service = opened()
    ask(service, model_of(service), 1)
    monkeypatch.setattr(service.store, "finish", fails)
    service._process.answer()
    assert service.ended.is_set() and "cannot be written down" in service.failure
    service = opened()
    monkeypatch.setattr(service._process, "start", fails)
    service._process.lost(-9)
    assert service.ended.is_set() and "cannot be replaced" in service.failure
