"""Asynchronous rollouts: the master's side of samples that are played while the trainer trains.

    ┌──────────────────────────────────────── master ──────────────────────────────────────────┐
    │  data source ─► SampleQueue ─► RolloutControl ─► StragglerGate ─► StreamLoader ─► step k │
    │                                 │    ▲    ▲                                         │    │
    │       admitted and not trained  │    │    │ v: the lowest version of all listed     │    │
    │           <= (eta + v + 1) * B  │    │    │    generation workers                   │    │
    └─────────────────────────────────┼────┼────┼─────────────────────────────────────────┼────┘
                             1. lease │    │    └── 5. WeightUpdates ◄────────────────┐    │ 4. calls
                                      ▼    │ 3. arrived (on the disk: ack)            │    ▼
    env server ◄── commands ── rollout worker ── 2. finished sample ──► stream ──► model worker
                                  │      ▲                          (payload log)      │
                           prefix ▼      │ tokens                                       │ version k + 1
                           generation worker ◄──────────── between two tokens ◄────────┘

``eta`` is ``async_rl.max_head_offpolicyness``, ``B`` the number of samples of a step.

Who produces what:

1. ``RolloutControl`` admits a sample of ``SampleQueue`` and leases it to a rollout worker that asks; the admission is
   in the journal first.
2. The rollout worker plays the group against the environment with tokens from generation workers, and streams it.
3. A model worker of the trainer, one of several perhaps, logs the sample to disk and tells the master, which stages it,
   notes who holds it and writes it into the journal.
4. ``StragglerGate`` chooses the samples of step k, ``StreamLoader`` puts them into the buffer, the graph trains on
   them.
5. ``WeightUpdates`` has the trainer publish version k + 1, and every generation worker load it between two tokens.

Who waits for whom, and until when:

- An idle player waits for a lease until there is capacity; it asks again every 10 s, and an empty answer means stop.
- Admission waits for a new version or for the end of a sample in play. It has no deadline; every sample in play has
  one, ``async_rl.rollout_deadline_s``, and 30 s later the master takes it back.
- A finished sample waits for room in the stream, until the same deadline.
- Step k waits for B samples that the gate lets through, without a deadline while samples are in play or weights are
  being loaded; else the executor's stall limit ends the run.
- Publishing version k + 1 waits until every listed generation worker has loaded version k. A worker that fails or does
  not answer within ``rpc.call_timeout_s`` is sent away, and a successor joins.
- A held-out evaluation is played in shares beside the samples, with weights that the generation workers keep for it
  (``HeldOutEvaluations``); nobody waits for it but the next evaluation, a checkpoint and the end of the run, and where
  an engine cannot keep two versions, the next one.
- ``AsyncRollouts.pause``, at the end, waits for every sample in play, for
  ``async_rl.rollout_deadline_s`` and 120 s.

So the oldest token of a trained sequence is at most ``eta`` versions behind, and with ``eta`` = 0 the loop is the
synchronous step. docs/architecture.md shows the same beside the other processes, docs/reference/dataflow.md 9 is the
contract.
"""
