"""Rollout worker: plays samples that the master admits and streams them to the trainer.

python -m workers.rollout_worker --run-dir DIR --run-id ID --master tcp://... --index 0
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from realhf.api.calls import PLAY, STOPPED, Nothing, PlayRequest
from realhf.api.chat_template import TemplateChat
from realhf.api.config import CONSTRAIN
from realhf.api.experiment import RolloutSpec, RunPlan
from realhf.api.model import CallContext
from realhf.api.sample import MicroBatchSpec
from realhf.backends.training.tokenizer_loading import check_context, load_tokenizer
from realhf.base.event_loops import new_event_loop
from realhf.base.loop_thread import LoopWatch
from realhf.base.process import block_exit_in_threads, collect_garbage_normally
from realhf.base.tls import embed_certificate
from realhf.env.loader.load import build_environment
from realhf.monitor.rollouts.writer import open_rollouts
from realhf.monitor.trace import open_trace
from realhf.rollout.feedback import Feedback
from realhf.rollout.generation_client import ConstrainedTokens, GenerationClient
from realhf.rollout.group_player import GroupPlayer, TokenTexts, failure_policy
from realhf.rollout.player import EpisodePlayer, make_agent
from realhf.rollout.rollout_loop import RolloutLoop, SampleEncoder
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.push_stream import StreamProducer
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.service import ServiceClient
from realhf.transport.sockets import raise_descriptor_limit
from workers.worker_main import run_planned, worker_network

DRAIN_S = 30.0
"""Seconds within which the trainer must receive the last samples at the end of the run."""
WATCH_S = 5.0
"""Interval in seconds at which the event loop is checked for blocking calls."""
_log = logging.getLogger(__name__)


class RolloutWorker:
    """Process that registers with the master and plays episodes after it has received the call
    ``play``.

    The main thread serves the master; another thread runs the event loop of all episodes.

    The rollout loop
      produces: finished samples, and results of evaluation shares;
      waits for: leases from the master, tokens, commands of the environment, and room in the
      stream;
      unblocked by: their answers, each with a deadline; an empty lease ends the loop.
    """

    def __init__(
        self,
        plan: RunPlan,
        spec: RolloutSpec,
        index: int,
        run_id: str,
        master: str,
        network: Network = LOOPBACK,
    ) -> None:
        self._plan = plan
        self._spec = spec
        self._run_id = run_id
        self._network = network
        self._incarnation = f"rollout_worker/{index}:{os.getpid()}"
        self._tracer = open_trace(plan.spec.run_dir, f"rollout_worker/{index}")
        self._recorder = open_rollouts(plan, f"rollout_worker/{index}", by_step=False)
        self._loop = new_event_loop()
        self._generation: GenerationClient | None = None
        self._failure: BaseException | None = None
        self._env_urls: tuple[str, ...] = ()
        """URLs of the environment services; () for an environment that runs in this process."""
        self._rpc = RpcWorker(
            f"rollout_worker/{index}",
            "rollout_worker",
            index,
            run_id,
            master,
            ordered=dict([PLAY.with_handler(self._play)]),
            network=network,
            connect_timeout_s=plan.rpc.connect_timeout_s,
            on_roster=self._on_roster,
        )

    def run(self) -> None:
        """Serve until the master says goodbye. Raises the error of the rollout loop, or
        MasterLost."""
        episodes = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        episodes.start()
        watch = LoopWatch(self._loop, episodes.ident or 0)
        threading.Thread(target=self._watch, args=(watch,), name="watch", daemon=True).start()
        try:
            self._rpc.run()
        finally:
            self._recorder.close()
            self._tracer.close()
        if self._failure is not None:
            raise self._failure

    def _watch(self, watch: LoopWatch) -> None:
        """Stop the worker if an environment or an agent blocks the event loop for longer than the
        message timeout."""
        limit_s = self._spec.episodes.message_timeout_s
        while True:
            time.sleep(WATCH_S)
            if (seconds := watch.blocked_s()) > limit_s:
                self._failure = RuntimeError(
                    f"its event loop has been blocked for {seconds:.0f} s: {watch.current_line()}"
                )
                self._rpc.stop()
                return
            if seconds:
                _log.warning("the event loop of the episodes is blocked: %s", watch.current_line())

    def _play(self, request: PlayRequest) -> Nothing:
        """Start the rollout loop in the event loop."""
        asyncio.run_coroutine_threadsafe(self._run_loop(request), self._loop)
        return Nothing()

    async def _run_loop(self, request: PlayRequest) -> None:
        try:
            await self._play_all(request.control, request.streams, request.env)
        except Exception as error:
            self._failure = error
            self._rpc.stop()

    async def _play_all(
        self, control: str, streams: Sequence[str], env_urls: Sequence[str]
    ) -> None:
        timeout_s = self._plan.rpc.control_timeout_s
        async with AsyncExitStack() as stack:
            client = ServiceClient(
                control, "the master", self._incarnation, self._run_id, self._network
            )
            stack.callback(client.close)
            producer = StreamProducer(
                streams, self._incarnation, self._run_id, network=self._network
            )
            stack.callback(producer.close)
            self._generation = GenerationClient(
                self._incarnation,
                self._run_id,
                timeout_s=self._spec.options.rollout_deadline_s,
                network=self._network,
            )
            stack.callback(self._generation.close)
            self._generation.update(_generation_workers(self._rpc.roster))
            loop = RolloutLoop(
                client,
                producer,
                self._build_players(self._generation, env_urls),
                self._build_encoder(),
                tracer=self._tracer,
                timeout_s=max(timeout_s, self._spec.options.rollout_deadline_s),
            )
            await loop.run()
            if not await producer.drain(DRAIN_S):
                raise RuntimeError(
                    f"the stream did not take {producer.unacked} samples within {DRAIN_S:g} s"
                )
            await client.ask(STOPPED, Nothing(), timeout_s=timeout_s)

    def _build_players(
        self, generation: GenerationClient, env_urls: Sequence[str]
    ) -> list[GroupPlayer]:
        """Return a player for each group of sessions."""
        options = self._spec.episodes
        group = options.group_size
        model = self._plan.spec.models[self._spec.role]
        check_context(model.path, self._spec.role, options.max_total_tokens)
        tokenizer = load_tokenizer(model.path, self._spec.role)
        chat = TemplateChat(
            tokenizer,
            system_prompt=None,
            template_kwargs=model.chat_template_kwargs,
            stop_ids=options.gen.stop_ids,
            tool_parser=model.tool_parser,
        )
        self._feedback = Feedback.from_options(options, chat)
        texts = TokenTexts(tokenizer)
        environment = build_environment(options.environment, options.environment_options)
        agent = make_agent(
            self._spec.agent, chat, environment.system_prompt, options, self._spec.agent_args
        )
        policy = failure_policy(options.on_failure, options.retries, options.min_group_size)
        self._env_urls = tuple(env_urls) if environment.launch is not None else ()
        return [
            GroupPlayer(
                EpisodePlayer(
                    environment,
                    lambda number=number: self._env_address(number),
                    agent,
                    group,
                    first_slot=number * group,
                    retries=policy.retries,
                    message_timeout_s=options.message_timeout_s,
                    patience_s=self._plan.rpc.connect_timeout_s,
                ),
                generation,
                group_size=group,
                run_seed=self._plan.spec.seed,
                policy=policy,
                held_out=environment,
                pinned=lambda part: ConstrainedTokens(
                    generation, part.engines, pinned_version=part.version, greedy=part.greedy
                ),
                recorder=self._recorder,
                gen=options.gen,
                texts=texts,
            )
            for number in range(max(1, self._spec.sessions // group))
        ]

    def _build_encoder(self) -> SampleEncoder:
        options = self._spec.episodes
        spec = self._plan.spec
        context = CallContext(0, spec.seed, MicroBatchSpec(), spec.run_dir)
        return SampleEncoder(
            self._spec.calls[1:],
            context,
            min_group_size=options.min_group_size,
            transcripts=options.transcripts,
            batch_size=spec.n_seqs,
            turns=options.turn_rewards,
            feedback=self._feedback,
            unmasked=options.agent_structured == CONSTRAIN,
        )

    def _env_address(self, number: int) -> str:
        """Return the URL of the environment service for the player ``number``, with the run's token
        and certificate; "" if there is no service."""
        urls = self._env_urls
        keys = self._network.keys
        url = self._network.add_token(urls[number % len(urls)]) if urls else ""
        return url if keys is None else embed_certificate(url, keys.certificate)

    def _on_roster(self, roster: Mapping[str, WorkerInfo]) -> None:
        urls = tuple(
            info.endpoints["env"] for _, info in sorted(roster.items()) if "env" in info.endpoints
        )
        if urls and self._env_urls:
            self._env_urls = urls  # a service whose host was lost gets a new address
        workers = _generation_workers(roster)
        self._loop.call_soon_threadsafe(
            lambda: self._generation and self._generation.update(workers)
        )


def _generation_workers(roster: Mapping[str, WorkerInfo]) -> dict[str, str]:
    return {
        name: info.endpoints["generation"]
        for name, info in roster.items()
        if "generation" in info.endpoints
    }


def main() -> int:
    """Run the worker of a plan until the master ends it. Returns the exit code."""

    def work(plan: RunPlan, args: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        if plan.spec.rollout is None:
            raise ValueError(f"experiment {plan.spec.name} has no rollout workers")
        collect_garbage_normally()
        block_exit_in_threads()  # a sys.exit in an episode's thread must be an error, not the end of the process
        raise_descriptor_limit()  # for example to every rank of the trainer
        network = worker_network(plan, args)
        RolloutWorker(plan, plan.spec.rollout, args.index, args.run_id, args.master, network).run()

    return run_planned(str(__doc__), work)


if __name__ == "__main__":
    sys.exit(main())
