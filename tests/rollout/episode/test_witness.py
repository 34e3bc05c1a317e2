"""A witness is the environment that it is given, and remembers its answers of one episode."""

from realhf.api.environment import AssistantMessage, Environment
from realhf.rollout.episode import Witness
from tests.rollout.scripted_environment import Scripted, World


async def test_it_passes_everything_on_and_keeps_the_answers_of_the_last_episode() -> None:
    world = World()
    env: Environment = Witness(Scripted(world))
    assert isinstance(env, Witness)
    for seed in (1, 2):
        opening = await env.reset({"text": f"task {seed}"}, seed=seed)
        assert env.opening is opening and env.turns == []
        turn = await env.step(AssistantMessage("go", text="go"))
        assert env.turns == [turn]
    await env.close()
    assert world.closed == 1
