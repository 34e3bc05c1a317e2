"""Where options act that the table of ``tests/launch/option_effects.py`` does not see at work.

Each entry says where the option acts, and in brackets the test that shows it, which names the
option; or that none does. An entry whose name ends with a point or a bar is about all options that
begin so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ONE_VALUE = "has no other value in this experiment"
UNSHOWN = "no test gives it another value"
"""What an entry says that no test shows: a debt, counted by the test of the table."""
_ONE_WORKER = (
    "1 is what 0 stands for where the role has one worker (tests/launch/test_allocation.py)"
)
_PROCESSES = "says how many processes there are, not what they compute"
_BACKEND = (
    "on one worker every backend computes the same; on several (tests/launch/test_allocation.py)"
)
_COMPILED = "the compiler computes the same (tests/backends/training/test_compiled_blocks.py)"
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "experiment": "which file of options is composed, before any is set "
        "(tests/launch/test_compose.py)",
        "experiment_path": "the file of the experiment, before there is a configuration "
        "(tests/launch/test_experiments.py)",
        "mode": "the launcher runs, checks or prints the graph (tests/launch/test_compose.py)",
        "machine": "which machine a check plans for (tests/launch/test_planned_machines.py)",
        "torch_threads": f"threads of a model worker; {UNSHOWN}",
        "recover_mode": "whether the launcher goes on after a checkpoint "
        "(tests/launch/test_resume.py)",
        "exp_ctrl.ckpt_freq_steps": "the master writes checkpoints "
        "(tests/workers/test_master_worker.py)",
        "exp_ctrl.keep": "old checkpoints are removed (tests/dataflow/test_checkpoint.py)",
        "exp_ctrl.keep_best": "the folder best_policy (tests/launch/test_run.py)",
        "network.bind": "where the master listens (tests/transport/network/test_network.py)",
        "rpc.connect_timeout_s": "how long the master waits for workers "
        "(tests/dataflow/test_model_host.py)",
        "rpc.control_timeout_s": "how long control messages wait (tests/launch/test_run.py)",
        "rpc.heartbeat_s": "how often workers show that they live "
        "(tests/transport/rpc/test_rpc.py)",
        "rpc.dead_after_s": "when a silent worker is dead (tests/transport/rpc/test_heartbeat.py)",
        "rpc.shm": "tensors go through shared memory or sockets "
        "(tests/transport/tensors/test_data_plane.py)",
        "monitor.progress": "the live display; " + UNSHOWN,
        "monitor.rollout_tokens": "which groups keep tokens "
        "(tests/monitor/rollouts/test_rollouts.py)",
        "monitor.rollout_bytes": "when recording stops (tests/monitor/rollouts/test_rollouts.py)",
        "monitor.rollouts": "how many rollouts are kept (tests/monitor/rollouts/test_rollouts.py)",
        "monitor.episodes_every_steps": "which steps the trackers get transcripts of; " + UNSHOWN,
        "monitor.episodes_per_step": "nobody plays in this experiment, so nothing is written as "
        "text",
        "actor.parallel.": _ONE_WORKER,
        "critic.parallel.": _ONE_WORKER,
        "reward_model.parallel.": _ONE_WORKER,
        "warm_start.shipped": "only where the environment ships a policy that was made with the "
        "same settings "
        "(tests/experiments/test_shipped_policy.py)",
    }
)
"""Options of which the plan of an experiment says nothing, though it has them."""
TOLD: Mapping[str, str] = MappingProxyType(
    {
        "experiment": "the name in the plan and of the run folder (tests/launch/test_compose.py)",
        "experiment_name": "where the run folder is (tests/test_any_environment.py)",
        "trial_name": "where the run folder is (tests/test_any_environment.py)",
        "fileroot": "where the run folder is (tests/test_any_environment.py)",
        "total_train_steps": "how long the run is (tests/test_any_environment.py)",
        "actor.workers": _PROCESSES + " (tests/experiments/test_graphs.py)",
        "actor.backend": _BACKEND,
        "critic.backend": f"on one worker every backend computes the same; {UNSHOWN}",
        "reward_model.backend": f"on one worker every backend computes the same; {UNSHOWN}",
        "actor.compile": _COMPILED,
        "critic.compile": _COMPILED,
        "reward_model.compile": _COMPILED,
        "actor.tool_parser": "how calls in a turn are read; the tiny policy makes none "
        "(tests/launch/test_tool_calls.py)",
        "actor.experts": "accepts a mixture of experts, which it is not "
        "(tests/launch/test_model.py)",
        "reward_model.experts": "accepts a mixture of experts, which it is not "
        "(tests/launch/test_model.py)",
        "ref.workers": _PROCESSES + " (tests/experiments/test_ppo_graph.py)",
        "critic.workers": _PROCESSES + " (tests/experiments/test_ppo_graph.py)",
        "teacher.workers": _PROCESSES + " (tests/experiments/test_distillation.py)",
        "reward_model.workers": _PROCESSES + "; " + UNSHOWN,
        "reward_model.path": "the first weights (tests/experiments/test_graphs.py)",
        "warm_start.cache_dir": "where warm starts lie (tests/launch/test_compose.py)",
        "dataset.priority": "constants of a curriculum, seen after more tasks "
        "(tests/env/test_curriculum.py)",
        "dataset.untried_share": "what a curriculum draws once something succeeds "
        "(tests/env/test_curriculum.py)",
        "dataset.group_success": "what a curriculum takes for success "
        "(tests/env/test_curriculum.py)",
        "dataset.train_bs_n_seqs": "groups of a batch that others push "
        "(tests/test_any_environment.py)",
        "gen.new_tokens_per_chunk": "the same tokens in whatever chunks "
        "(tests/backends/embedded/test_generation.py)",
        "gen.stop_ids": "ends turns at tokens that the tiny policy did not sample "
        "(tests/backends/embedded/)",
        "engine.kv_cache_gib": "tokens are the same in whatever memory "
        "(tests/backends/embedded/test_generation.py)",
        "engine.": "what vLLM is told, which is not here (tests/backends/vllm/test_vllm.py)",
        "rollout.max_turns": "the tiny policy ends in its first turn "
        "(tests/rollout/test_played_episode.py)",
        "rollout.max_total_tokens": "a bound that it does not reach "
        "(tests/rollout/test_played_episode.py)",
        "rollout.min_group_size": "what becomes of failed rollouts "
        "(tests/rollout/test_played_episode.py)",
        "rollout.on_failure": "what becomes of failed rollouts (tests/aws/client/test_failures.py)",
        "rollout.retries": "what becomes of failed rollouts (tests/aws/test_environment.py)",
        "rollout.message_timeout_s": "how long a message to the environment waits "
        "(tests/rollout/test_player.py)",
        "rollout.sessions": "how many play at once, not what "
        "(tests/rollout/test_black_box_agent.py)",
        "rollout.agent": "who plays in rollout workers (tests/rollout/test_black_box_agent.py)",
        "rollout.keep_reasoning": "what prompts keep of reasoning "
        "(tests/rollout/test_truncating_conversation.py)",
        "evaluation.every_steps": "when the master evaluates (tests/workers/test_master_worker.py)",
        "rpc.call_timeout_s": f"how long a call waits; {UNSHOWN}",
        "monitor.episodes_per_step": f"how many episodes of a step are written as text; {UNSHOWN}",
        "ppo.algo": "the preset (tests/algorithms/policy_gradient/test_presets.py)",
        "ppo.adv_estimator": "another one than gae has no critic, which this experiment sets "
        "options of "
        "(tests/algorithms/policy_gradient/test_advantages.py)",
        "ppo.group_size": "rollouts of a group that others push (tests/experiments/test_graphs.py)",
        "ppo.feedback": "what rollouts say to the policy (tests/rollout/test_feedback.py)",
        "ppo.feedback_tokens": "how much rollouts say to the policy "
        "(tests/experiments/test_distillation.py)",
        "ppo.rl_weight": "the part of rewards beside a teacher "
        "(tests/algorithms/policy_gradient/test_distillation.py)",
        "preference.player": "who plays, with the same weights at first "
        "(tests/experiments/test_graphs.py)",
        "ppo.dynamic_sampling": "which groups the master has played again "
        "(tests/algorithms/policy_gradient/test_dapo.py)",
        "async_rl.enabled": "who plays (tests/experiments/test_graphs.py)",
        "async_rl.max_head_offpolicyness": "which samples are too old "
        "(tests/dataflow/rollouts/test_staleness.py)",
        "async_rl.n_rollout_workers": _PROCESSES + " (tests/experiments/test_graphs.py)",
        "async_rl.n_generation_workers": _PROCESSES + " (tests/launch/test_allocation.py)",
        "async_rl.kv_policy": "keys and values under new weights "
        "(tests/backends/embedded/test_continuous_batching.py)",
        "async_rl.weights": "how weights travel (tests/launch/test_compose.py)",
        "async_rl.rollout_deadline_s": "when a sample is given back "
        "(tests/dataflow/rollouts/test_async_rollouts.py)",
        "async_rl.recover_retries": "how often a run begins again (tests/launch/test_processes.py)",
        "async_rl.recover_window_s": "which deaths count (tests/launch/test_processes.py)",
        "async_rl.niceness": "how processes are started (tests/launch/test_processes.py)",
        "async_rl.max_deaths": "when a sample is given up "
        "(tests/dataflow/rollouts/test_control.py)",
        "async_rl.": UNSHOWN,
        "stream.url": "where groups come from (tests/experiments/test_graphs.py)",
        "stream.token_file": "the token of that server (tests/launch/test_compose.py)",
        "stream.ca_file": "the certificates of that server (tests/trajectory/http/test_tls.py)",
        "stream.port": "where the server of the run listens (tests/test_stream_end_to_end.py)",
        "stream.max_staleness": "which groups are too old (tests/launch/test_compose.py)",
        "stream.wait_s": "how long a step waits (tests/trajectory/training/test_dataset.py)",
        "stream.": UNSHOWN,
        "teacher.path": "the teacher's weights (tests/experiments/test_distillation.py)",
        "teacher.url": "the teacher's server (tests/backends/vllm/test_served_logprobs.py)",
        "teacher.model": "what the teacher's server is asked for "
        "(tests/experiments/test_distillation.py)",
        "teacher.token_file": "the token of that server (tests/experiments/test_distillation.py)",
        "teacher.connections": f"how many sequences are sent at once; {UNSHOWN}",
        "env.": "the server of the environment, or what its tasks are "
        "(tests/aws/test_environment.py)",
    }
)
"""Options that change the plan and nothing that the tiny policy does with it."""
