"""The dataflow graph: edges from keys, and every error that stops it from being built."""

import subprocess
import sys

import networkx
import pytest

from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.graph import DATASET, GraphError, build_graph

GEN = InterfaceType.GENERATE
INF = InterfaceType.INFERENCE
TRAIN = InterfaceType.TRAIN_STEP


def mfc(name, kind, inputs="", outputs="", **more):
    return MFCDef(
        name,
        more.pop("role", "actor"),
        kind,
        "some_interface",
        input_keys=tuple(inputs.split()),
        output_keys=tuple(outputs.split()),
        **{"n_seqs": 16, **more},
    )


def grpo(**more):
    return [
        mfc("actor_gen", GEN, "packed_prompts", "packed_input_ids packed_logprobs env_rewards"),
        mfc("ref_inf", INF, "packed_input_ids", "packed_ref_logprobs", role="ref", n_seqs=8),
        mfc("rew_inf", INF, "env_rewards", "rewards"),
        mfc(
            "actor_train",
            TRAIN,
            "packed_input_ids packed_logprobs packed_ref_logprobs rewards",
            **more,
        ),
    ]


def problems(mfcs, keys, **more):
    with pytest.raises(GraphError) as caught:
        build_graph(mfcs, keys, **more)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


def test_the_grpo_graph_follows_from_its_keys():
    graph = build_graph(grpo(), ["packed_prompts", "unused"])
    assert graph.topological_levels() == [["actor_gen"], ["ref_inf", "rew_inf"], ["actor_train"]]
    assert graph.n_seqs == 16
    assert graph.producers("packed_input_ids") == ("actor_gen",)
    assert graph.producers("packed_prompts") == (DATASET,) and graph.producers("nothing") == ()
    assert graph.consumers("packed_input_ids") == ("ref_inf", "actor_train")
    assert graph.required_dataset_keys() == ["packed_prompts"]
    assert isinstance(graph.nx, networkx.MultiDiGraph)
    assert sorted(key for _, _, key in graph.nx.out_edges("actor_gen", keys=True)) == [
        "env_rewards",
        "packed_input_ids",
        "packed_input_ids",
        "packed_logprobs",
    ]
    assert graph.warnings == ()


def test_a_single_training_call_on_a_dataset():
    graph = build_graph(
        [mfc("actor_train", TRAIN, "packed_input_ids loss_mask")], ["packed_input_ids", "loss_mask"]
    )
    assert graph.topological_levels() == [["actor_train"]]
    assert graph.required_dataset_keys() == ["loss_mask", "packed_input_ids"]


@pytest.mark.parametrize("produced", [True, False])
def test_optional_inputs_bind_only_if_produced(produced):
    train = mfc("actor_train", TRAIN, "x", optional_input_keys=("packed_ref_logprobs",))
    calls = [train, mfc("ref_inf", INF, "x", "packed_ref_logprobs")] if produced else [train]
    graph = build_graph(calls, ["x"])
    assert graph.inputs("actor_train") == (("x", "packed_ref_logprobs") if produced else ("x",))
    assert (graph.topological_levels()[-1] == ["actor_train"]) and len(
        graph.topological_levels()
    ) == 1 + produced


def test_calls_of_one_level_are_sorted_whatever_the_order_of_definition():
    """The order within a level is the order of the table and of the drawings, so it depends on
    names alone."""
    calls = [mfc(name, INF, "x", f"y_{name}") for name in ("c", "a", "b")]
    calls.append(mfc("t", TRAIN, "y_c y_a y_b"))
    for order in (calls, calls[::-1]):
        assert build_graph(order, ["x"]).topological_levels() == [["a", "b", "c"], ["t"]]


def test_ancestors_are_the_calls_that_come_before():
    graph = build_graph(grpo(), ["packed_prompts"])
    assert graph.ancestors("actor_train") == {"actor_gen", "ref_inf", "rew_inf"}
    assert (
        graph.ancestors("rew_inf") == {"actor_gen"} and graph.ancestors("actor_gen") == frozenset()
    )


def test_duplicate_names():
    found = problems(
        [mfc("a", INF, "x", "y"), mfc("a", INF, "y", "z"), mfc("t", TRAIN, "z")], ["x"]
    )
    assert found == ["2 model function calls are named 'a'"]


def test_two_producers_of_a_key():
    calls = [mfc("a", INF, "x", "y"), mfc("b", INF, "x", "y"), mfc("t", TRAIN, "y")]
    assert problems(calls, ["x"]) == ["key 'y' has 2 producers: 'a' and 'b'"]
    calls = [mfc("a", INF, "x", "y"), mfc("t", TRAIN, "y")]
    assert problems(calls, ["x", "y"]) == ["key 'y' has 2 producers: the dataset and 'a'"]


def test_a_missing_key_names_the_call_and_a_close_key():
    calls = grpo()
    calls[1] = mfc("ref_inf", INF, "packed_inptu_ids", "packed_ref_logprobs")
    assert problems(calls, ["packed_prompts"]) == [
        "'ref_inf' needs key 'packed_inptu_ids', which no call and no dataset produces; did you "
        "mean "
        "'packed_input_ids'?"
    ]
    assert problems([mfc("t", TRAIN, "zebra")], ["x"]) == [
        "'t' needs key 'zebra', which no call and no dataset produces"
    ]


def test_a_cycle_is_printed_as_a_path():
    calls = [mfc("a", INF, "x z", "y"), mfc("b", INF, "y", "z")]
    (found,) = problems(calls, ["x"])
    assert found in (
        "the calls form a cycle: a -[y]-> b -[z]-> a",
        "the calls form a cycle: b -[z]-> a -[y]-> b",
    )
    (found,) = problems([mfc("a", INF, "x y", "y")], ["x"])
    assert found == "the calls form a cycle: a -[y]-> a"


def test_training_cannot_produce_keys_that_are_read():
    calls = [mfc("t", TRAIN, "x", "y"), mfc("u", TRAIN, "y")]
    assert problems(calls, ["x"]) == ["'t' is a train_step and cannot produce key 'y', read by 'u'"]


def test_n_seqs_must_divide_the_step():
    assert problems(grpo(n_seqs=6), ["packed_prompts"]) == [
        "'actor_train' takes n_seqs=6 samples, which does not divide the step's 16"
    ]


def test_a_role_without_a_model():
    assert problems(grpo(), ["packed_prompts"], roles=["actor"]) == [
        "'ref_inf' runs on model role 'ref', which has no model (models: actor)"
    ]


def test_unread_outputs_warn():
    calls = [*grpo(), mfc("extra", INF, "packed_input_ids", "values")]
    text = "'extra' produces key 'values', which no call reads and which is not in log_keys"
    assert build_graph(calls, ["packed_prompts"]).warnings == (text,)
    assert build_graph(calls, ["packed_prompts"], log_keys=["values"]).warnings == ()


def test_all_problems_come_at_once():
    calls = [
        mfc("a", INF, "x q", "y"),
        mfc("b", INF, "x", "y", role="ghost"),
        mfc("t", TRAIN, "y", n_seqs=5),
    ]
    found = problems(calls, ["x"], roles=["actor"])
    assert len(found) == 4
    assert [
        any(word in p for p in found) for word in ("2 producers", "'q'", "ghost", "n_seqs=5")
    ] == [True] * 4
    assert problems([], ["x"]) == ["there is no model function call"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_seqs": 0}, "n_seqs is 0"),
        ({"name": ""}, "must not be empty"),
        ({"balance": "luck"}, "'luck' is not tokens or count"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"input_keys": ("x", "x")}, "input keys declared twice: x"),
        ({"output_keys": ("y", "y")}, "output keys declared twice: y"),
        ({"input_key_remap": {"q": "x"}}, "input_key_remap names keys it does not take: q"),
        ({"output_key_remap": {"x": "q"}}, "output_key_remap yields keys it does not output: q"),
        (
            {"input_keys": ("x", "z"), "input_key_remap": {"x": "k", "z": "k"}},
            "maps two keys to one name",
        ),
    ],
)
def test_a_call_that_cannot_be_right(change, message):
    good = {
        "name": "a",
        "model_role": "actor",
        "interface_type": INF,
        "interface": "i",
        "input_keys": ("x",),
        "output_keys": ("y",),
    }
    with pytest.raises(ValueError, match=message):
        MFCDef(**{**good, **change})


def drawn():
    return build_graph(grpo(), ["packed_prompts"])


def test_drawings_show_every_call_and_every_key():
    for text in (drawn().to_mermaid(), drawn().to_dot(), drawn().summary()):
        for word in (
            "actor_gen",
            "ref_inf",
            "rew_inf",
            "actor_train",
            "packed_ref_logprobs",
            "packed_prompts",
        ):
            assert word in text
    assert (
        '  actor_gen -- "packed_input_ids, packed_logprobs" --> actor_train' in drawn().to_mermaid()
    )
    assert '"rew_inf" -> "actor_train" [label="rewards"];' in drawn().to_dot()


@pytest.mark.slow
def test_the_graph_needs_no_torch():
    code = "import sys, realhf.api.graph, realhf.api.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
