"""Asynchronous rollouts, master side: samples are played while the trainer trains.

  ┌──────────────────────────────────────── master ──────────────────────────────────────────┐
  │  data source ─► SampleQueue ─► RolloutControl ─► StragglerGate ─► StreamLoader ─► step k │
  │                                 │    ▲    ▲                                         │    │
  │       admitted and not trained  │    │    │ v: the lowest version of all listed     │    │
  │           <= (eta + v + 1) * B  │    │    │    generation workers                   │    │
  └─────────────────────────────────┼────┼────┼─────────────────────────────────────────┼────┘
                           1. lease │    │    └── 5. WeightUpdates ◄────────────────┐    │ 4. calls
                                    ▼    │ 3. arrived (on disk: ack)                │    ▼
  env server ◄── commands ── rollout worker ── 2. finished sample ──► stream ──► model worker
                                │      ▲                          (payload log)      │
                         prefix ▼      │ tokens                                       │ version k+1
                         generation worker ◄──────────── between two tokens ◄────────┘

``eta`` is ``async_rl.max_head_offpolicyness``, ``B`` the number of samples of a step.

The path of a sample:

1. ``RolloutControl`` admits a sample of ``SampleQueue`` and leases it to a rollout worker that asks
   for one; the admission is journaled first.
2. The rollout worker plays the group against the environment with tokens from generation workers,
   and streams it.
3. One of the trainer's model workers logs the sample to disk and reports it to the master, which
   journals it, stages it and records its location.
4. ``StragglerGate`` selects the samples of step k, ``StreamLoader`` puts them into the buffer, the
   graph trains on them.
5. ``WeightUpdates`` has the trainer publish version k + 1, and every generation worker load it
   between two tokens.

The loops:

- **Idle player.** Produces finished samples; waits for a lease; unblocked by capacity. It asks
  again every 10 s; an empty answer tells it to stop.
- **Admission.** Produces leases; waits for capacity; unblocked by a new version or the end of a
  sample being played. It has no separate deadline.
- **Sample being played.** Produces a staged sample; waits for tokens, commands and room in the
  stream; ends with its result or after ``async_rl.rollout_deadline_s``. 30 s later the master takes
  it back.
- **Step k.** Produces new weights; waits for B samples that the gate releases; unblocked by
  arrivals. It has no deadline while samples are being played or weights are being loaded; otherwise
  the executor's stall limit ends the run.
- **Publication of version k + 1.** Produces a weight version; waits until every listed generation
  worker has loaded version k; unblocked by their answers. A worker that fails or exceeds
  ``rpc.call_timeout_s`` is dismissed, and a successor joins.
- **Held-out evaluation.** Produces a report; waits for its shares, played in parallel with the
  samples on pinned weights (``HeldOutEvaluations``); unblocked by the rollout workers' answers.
  Only the next evaluation, a checkpoint and the end of the run wait for it, and, where an engine
  cannot keep two versions, the next publication.
- **End of the run** (``AsyncRollouts.drain``). Waits for every sample being played, at most
  ``async_rl.rollout_deadline_s`` + 120 s.

So the oldest token of a trained sequence is at most ``eta`` versions behind, and with ``eta`` = 0
the loop is the synchronous step. docs/architecture.md shows this together with the other processes;
docs/reference/dataflow.md 9 is the contract.
"""
