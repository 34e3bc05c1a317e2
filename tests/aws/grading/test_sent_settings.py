"""Settings that the simulator drops, compared as they were sent: other values, values that came
later, defaults, what is no setting of the target, and what the table does not know."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.aws.grading.member_notes import check_notes, read_notes
from realhf.aws.grading.sent_settings import (
    REMAKE,
    Default,
    MemberTable,
    SentWrite,
    build_settings,
    build_writes,
    find_differing_settings,
    member_table,
)
from realhf.aws.grading.sent_settings import (
    TABLE as TABLE_FILE,
)
from realhf.aws.grading.snapshot import Snapshot
from realhf.aws.grading.stack_templates import UnreadTemplate, read_declared_resources
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN
from realhf.aws.tasks.task import TaskError

MAKE = "autoscaling:CreateAutoScalingGroup"
CHANGE = "autoscaling:UpdateAutoScalingGroup"
NETWORK = "ec2:CreateVpc"
TABLE = MemberTable(
    {
        MAKE: {
            "AutoScalingGroupName": "names the resource",
            "MinSize": "kept",
            "Context": "not kept",
            "Tags": "text",
        },
        CHANGE: {
            "AutoScalingGroupName": "names the resource",
            "MinSize": "kept",
            "Policy.Kinds[].Name": "not kept",
        }
        | {"Context": "not kept", "Cooldown": "default", "Token": "steers the request only"},
        NETWORK: {"CidrBlock": "kept", "Pool": "not kept"},
        "ec2:ModifyVpcAttribute": {"VpcId": "names the resource", "Attributes.*": "not kept"},
    },
    {
        MAKE: ["AutoScalingGroupName"],
        CHANGE: ["AutoScalingGroupName"],
        "ec2:ModifyVpcAttribute": ["VpcId"],
    },
    uses=["autoscaling:ExecutePolicy"],
    defaults=[Default(CHANGE, "Cooldown", "300"), Default(CHANGE, "Port", "80", {"Kind": "web"})],
)
TARGET = [
    SentWrite(MAKE, {"AutoScalingGroupName": "shop", "MinSize": 1}),
    SentWrite(CHANGE, {"AutoScalingGroupName": "shop"}),
]


SHOP = ("autoscaling", "asgs", "shop")
GONE = SentWrite(
    "autoscaling:DeleteAutoScalingGroup",
    {"AutoScalingGroupName": "shop"},
    removed=frozenset({SHOP}),
)


def born(deeds: list[SentWrite]) -> list[SentWrite]:
    """Return requests, the first of which made the group."""
    return [replace(deeds[0], created=frozenset({SHOP})), *deeds[1:]]


def words(mine: list[SentWrite], wanted: list[SentWrite] = TARGET) -> list[str]:
    account = {("autoscaling", "asgs", "shop"): {}}
    return find_differing_settings(
        build_settings(mine, TABLE), build_settings(wanted, TABLE), account, account
    )


def change(name: str = "shop", **more: object) -> SentWrite:
    return SentWrite(CHANGE, {"AutoScalingGroupName": name, **more})


def test_another_value_of_what_is_not_kept_is_told_with_operation_and_member() -> None:
    assert words([*TARGET, change(Context="other")]) == [
        f"{CHANGE} Context = other and not nothing, of shop"
    ]
    assert not words([*TARGET, change(MinSize=7)]), "the account tells it"
    assert not words([*TARGET, change(Token="other")])
    assert words([*TARGET, change(Policy={"Kinds": [{"Name": "b"}, {"Name": "a"}]})]) == [
        f"{CHANGE} Policy.Kinds[].Name = a, b and not nothing, of shop"
    ]


def test_what_the_solution_sent_and_the_play_did_not_counts_the_same_way() -> None:
    wanted = [*TARGET, change(Context="mine")]
    assert words(TARGET, wanted) == [f"{CHANGE} Context = nothing and not mine, of shop"]
    assert not words(wanted, wanted)


def test_a_setting_is_as_it_was_sent_last() -> None:
    wanted = [SentWrite(MAKE, {"AutoScalingGroupName": "shop", "Context": "mine"})]
    wrong = [*wanted, change(Context="other")]
    assert words(wrong, wanted) and not words([*wrong, change(Context="mine")], wanted)
    assert words([*wrong, *wanted], wanted), "what is there is not created again"
    assert not words([*born(wrong), GONE, *wanted], wanted), "made anew, nothing of it is left"
    assert words([*wrong, change(MinSize=2)], wanted), "an update changes what it names alone"
    other = SentWrite("autoscaling:CreateLaunchConfiguration", {"LaunchConfigurationName": "shop"})
    assert words([*wrong, other], wanted), "what is of another kind may have the same name"


def test_only_what_is_gone_from_the_account_is_forgotten() -> None:
    table = MemberTable({"s3:CreateBucket": {"Context": "not kept"}}, {})
    bucket = ("s3", "buckets", "shop")
    made = SentWrite(
        "s3:CreateBucket", {"Bucket": "shop", "Context": "other"}, created=frozenset({bucket})
    )
    ruled = SentWrite("s3:PutBucketCors", {"Bucket": "shop", "Rules": "wide"})
    part = SentWrite(
        "s3:DeleteBucketCors",
        {"Bucket": "shop"},
        removed=frozenset({("s3", "bucket_cors", "shop")}),
    )
    whole = SentWrite("s3:DeleteBucket", {"Bucket": "shop"})

    def held(*deeds: SentWrite) -> set[str]:
        return {path[0] for settings in build_settings(deeds, table).values() for path in settings}

    assert held(made, ruled, part) == {"context"}
    assert held(made, ruled, replace(whole, params={"Bucket": "shop", "VersionId": "1"})) >= {
        "context",
        "rules",
    }
    assert held(made, ruled, whole) >= {"context", "rules"}, "it was asked for, and nothing went"
    assert not held(made, ruled, replace(whole, removed=frozenset({bucket}))) - {"bucket"}
    other = SentWrite("s3:DeleteObjects", {"Bucket": "shop"}, removed=frozenset({bucket}))
    assert "context" not in held(made, ruled, other), "whatever request removed it"
    by_setup = replace(made, created=frozenset())
    assert "context" in held(by_setup, whole)
    assert "context" not in held(by_setup, replace(whole, removed=frozenset({bucket})))


def test_what_is_restored_is_not_about_to_end() -> None:
    ends = SentWrite("kms:ScheduleKeyDeletion", {"KeyId": "k", "PendingWindowInDays": 7})
    table_notes = {"kms:ScheduleKeyDeletion": {"PendingWindowInDays": "not kept"}}
    table = MemberTable(
        table_notes, {"kms:ScheduleKeyDeletion": ["KeyId"], "kms:CancelKeyDeletion": ["KeyId"]}
    )
    account = {("kms", "keys", "k"): {}}
    assert told_of([ends], [], account, table)
    assert not told_of(
        [ends, SentWrite("kms:CancelKeyDeletion", {"KeyId": "k"})], [], account, table
    )


def test_a_documented_default_is_as_good_as_nothing() -> None:
    assert not words([*TARGET, change(Cooldown=300)])
    assert words([*TARGET, change(Cooldown=301)])
    assert not words(TARGET, [*TARGET, change(Cooldown=300)])
    assert not words([*TARGET, change(Kind="web", Port=80)], [*TARGET, change(Kind="web")])
    assert words([*TARGET, change(Kind="mail", Port=80)], [*TARGET, change(Kind="mail")])


def test_what_an_operation_only_takes_away_is_no_setting() -> None:
    noted = MemberTable(
        {},
        {},
        fate_from_notes=lambda operation, path: (
            "steers the request only" if path == "DryRun" else ""
        ),
    )
    assert (
        noted.fate("lambda:UpdateFunctionConfiguration", ("DryRun",)) == "steers the request only"
    )
    assert noted.fate("lambda:UpdateFunctionConfiguration", ("Layers",)) == "not probed"
    assert noted.fate("lambda:DeleteFunction", ("Qualifier",)) == "names the resource"


def told_of(
    mine: list[SentWrite], wanted: list[SentWrite], account: dict, table: MemberTable = TABLE
) -> list[str]:
    return find_differing_settings(
        build_settings(mine, table), build_settings(wanted, table), account, account
    )


def test_what_was_not_probed_is_judged_by_the_account_where_that_shows_it() -> None:
    account = {
        ("autoscaling", "asgs", "shop"): {
            "Novelty": "suffix",
            "Size": 2,
            "Rules": '{"Kind": [1, {"Color": "blue"}]}',
        },
        ("autoscaling", "asgs", "other"): {"Count": 9},
    }
    shown = [change(Novelty="Suffix"), change(Size=2), change(Text="blue"), change(Size=[2])]
    shown += [change(Paint={"Color": "blue"}), change(Rules='{ "Kind": [{"Color":"blue"}, 1] }')]
    for deed in shown:
        assert not told_of([*TARGET, deed], TARGET, account), deed
        assert not told_of(TARGET, [*TARGET, deed], account), (
            "the account tells whether the play has it"
        )
    hidden = [
        change(Novelty="prefix"),
        change(Size=3),
        change(Other=2),
        change(Count=9),
        change(Kind="blu"),
    ]
    for deed in [*hidden, change(Rules='{"Kind": [{"Color": "red"}]}'), change(Context="suffix")]:
        assert told_of([*TARGET, deed], TARGET, account), deed


def test_one_attribute_alone_is_known_by_its_name() -> None:
    queue = MemberTable({"sqs:CreateQueue": {"Attributes.Delay": "not kept"}}, {}, uses=())

    def attribute(name: str, value: str) -> SentWrite:
        return SentWrite(
            "sns:SetSubscriptionAttributes", {"AttributeName": name, "AttributeValue": value}
        )

    account = {("sns", "subs", "one"): {"RawMessageDelivery": "true"}}
    assert not told_of([attribute("RawMessageDelivery", "true")], [], account, queue)
    assert told_of([attribute("RawMessageDelivery", "false")], [], account, queue)
    assert told_of([attribute("Delivery", "true")], [], account, queue)
    assert not told_of([SentWrite("sqs:CreateQueue", {"Attributes": {}})], [], account, queue), (
        "nothing was asked for"
    )
    assert told_of([SentWrite("sqs:CreateQueue", {"Attributes": {"": "1"}})], [], account, queue), (
        "a name may be empty"
    )
    made = SentWrite("sqs:CreateQueue", {"Attributes": {"Delay": "1"}})
    (settings,) = build_settings(
        [made, SentWrite("sqs:SetQueueAttributes", {"Attributes": {"Other": "2"}})], queue
    ).values()
    assert {path[0] for path in settings} == {"delay", "other"}, (
        "one attribute leaves the others as they are"
    )


def test_several_things_of_one_name_may_come_in_any_order() -> None:
    table = MemberTable(
        {"glue:CreateTable": {"Owner": "not kept", "Keys[]": "not kept"}},
        {"glue:CreateTable": ["DatabaseName"]},
    )

    def thing(**more: object) -> SentWrite:
        return SentWrite("glue:CreateTable", {"DatabaseName": "shop", **more})

    def told(mine: list[SentWrite], wanted: list[SentWrite]) -> list[str]:
        return told_of(mine, wanted, {("glue", "databases", "shop"): {}}, table)

    wanted = [thing(Name="a", Owner="one"), thing(Name="b", Owner="two"), thing(Name="c")]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
        assert not told([wanted[place] for place in order], wanted), order
    assert told([*wanted, thing(Name="d", Owner="three")], wanted)
    assert told([thing(Name="b", Owner="three"), *wanted], wanted), (
        "what was created first is not overwritten"
    )
    assert told([thing(Name="a"), thing(Name="b")], wanted[:2])
    together = [thing(Keys=["x", "y"])]
    apart = [thing(Keys=["x"]), thing(Keys=["y"])]
    assert (
        not told(together, apart) and not told(apart, together) and not told(apart[::-1], together)
    )
    assert told([thing(Keys=["x", "z"])], apart)


def test_a_second_creation_leaves_what_the_first_one_was_told() -> None:
    wrong = SentWrite(MAKE, {"AutoScalingGroupName": "shop", "MinSize": 1, "Context": "other"})
    again = SentWrite(MAKE, {"AutoScalingGroupName": "shop", "MinSize": 1})
    assert words(born([wrong, again]))
    assert not words([*born([wrong]), GONE, again])


def test_a_resource_that_is_gone_takes_the_settings_of_its_parts_with_it() -> None:
    def told(*deeds: SentWrite) -> list[str]:
        table = MemberTable(
            {},
            {
                "lambda:CreateAlias": ["FunctionName", "Name"],
                "lambda:CreateFunction": ["FunctionName"],
            },
        )
        settings = build_settings(deeds, table)
        return sorted(one.operation for held in settings.values() for one in held.values())

    key = ("lambda", "functions", "pay")
    function = SentWrite("lambda:CreateFunction", {"FunctionName": "pay"}, created=frozenset({key}))
    alias = SentWrite(
        "lambda:CreateAlias", {"FunctionName": "pay", "Name": "live", "Routing": "odd"}
    )
    assert told(
        function, alias, SentWrite("lambda:DeleteFunctionConcurrency", {"FunctionName": "pay"})
    )
    assert not told(
        function,
        alias,
        SentWrite("lambda:DeleteFunction", {"FunctionName": "pay"}, removed=frozenset({key})),
    )


def test_a_later_request_names_by_its_id_what_was_made_with_others() -> None:
    made = SentWrite(NETWORK, {"Pool": "a"}, (("ec2", "acl-1"), ("ec2", "vpc-1")))
    change = SentWrite("ec2:ModifyVpcAttribute", {"VpcId": "vpc-1", "Pool": "b"})
    (settings,) = build_settings([made, change], TABLE).values()
    assert settings["pool",].last == {"b"}


def test_a_resource_of_this_account_is_the_same_by_name_and_by_arn() -> None:
    wanted = [*TARGET, change(Context="mine")]
    assert not words([*TARGET, change(Context="arn:aws:iam::000000000000:role/mine")], wanted)
    assert words([*TARGET, change(Context="arn:aws:iam::999999999999:role/mine")], wanted)


def test_only_resources_of_the_target_have_settings() -> None:
    assert not words([*TARGET, change("mine", Context="other")])
    assert not words(
        [
            *TARGET,
            SentWrite("autoscaling:ExecutePolicy", {"AutoScalingGroupName": "shop", "Metric": 1}),
        ]
    )


def test_what_the_table_does_not_know_counts_as_not_kept() -> None:
    (word,) = words([*TARGET, change(Novelty=True)])
    assert word.startswith(
        f"{CHANGE} Novelty = true and not nothing; {REMAKE} finds out"
    ) and word.endswith("of shop")
    (word,) = words(
        [*TARGET, SentWrite("autoscaling:PutNews", {"AutoScalingGroupName": "shop", "Size": 1})]
    )
    assert "PutNews Size = 1" in word and REMAKE in word


def test_what_bears_no_name_is_known_by_the_id_that_was_drawn_for_it() -> None:
    def network(name: str, pool: str) -> list[SentWrite]:
        made = SentWrite(NETWORK, {"CidrBlock": "10.0.0.0/16", "Pool": pool}, (("ec2", name),))
        return [
            made,
            SentWrite("ec2:ModifyVpcAttribute", {"VpcId": name, "Attributes": {"dns": pool}}),
        ]

    def told(mine: list[SentWrite]) -> list[str]:
        settings = build_settings(mine, TABLE, lambda text: text.replace("vpc-2", "vpc-1"))
        account = {("ec2", "vpcs", "vpc-1"): {}}
        return find_differing_settings(
            settings, build_settings(network("vpc-1", "a"), TABLE), account, account
        )

    assert not told(network("vpc-2", "a"))
    assert len(told(network("vpc-2", "b"))) == 2
    assert not told([*network("vpc-3", "b"), *network("vpc-2", "a")]), (
        "the other one is not the target's"
    )


def _stack(operation: str, body: str = "", **more: object) -> SentWrite:
    return SentWrite(
        f"cloudformation:{operation}", {"StackName": "shop", "TemplateBody": body, **more}
    )


def _declaring(**properties: object) -> str:
    group = {"Type": "AWS::AutoScaling::AutoScalingGroup", "Properties": properties}
    return json.dumps(
        {"Parameters": {"What": {"Default": "mine"}}, "Resources": {"Group": group}}, indent="\t"
    )


def told_of_stacks(*deeds: SentWrite) -> list[str]:
    table = MemberTable(
        {"AWS::AutoScaling::AutoScalingGroup": {"Context": "not kept"}}, {}, uses=()
    )
    settings = build_settings(deeds, table)
    return sorted(
        value for held in settings.values() for one in held.values() for value in one.last
    )


def test_a_template_sets_what_it_declares() -> None:
    made = _stack("CreateStack", _declaring(Context={"Ref": "What"}))
    assert "mine" in told_of_stacks(made)
    given = [{"ParameterKey": "What", "ParameterValue": "other"}]
    again = _stack("UpdateStack", UsePreviousTemplate=True, Parameters=given)
    assert "other" in told_of_stacks(made, again), "the same template with another value"
    kept = [{"ParameterKey": "What", "UsePreviousValue": True}]
    assert "other" in told_of_stacks(
        made, again, _stack("UpdateStack", UsePreviousTemplate=True, Parameters=kept)
    )


def test_a_template_that_cannot_be_read_is_told() -> None:
    nested = json.dumps(
        {"Resources": {"Inner": {"Type": "AWS::CloudFormation::Stack", "Properties": {}}}}
    )
    for body in ("{", nested):
        settings = build_settings([_stack("CreateStack", body)], TABLE)
        (word,) = [
            word for word in find_differing_settings(settings, {}, {}, {}) if "::Template" in word
        ]
        assert "TemplateBody" in word


@pytest.mark.parametrize(
    "body",
    [
        "Resources: {T: {Type: 'AWS::SNS::Topic', Properties: {Ref: 'AWS::Region'}}}",
        "Resources: {T: {Type: 'AWS::SNS::Topic', Properties: {A: !!timestamp foo, B: !!int ''}}}",
        "{Transform: 'AWS::LanguageExtensions', Resources: {T: {Type: 'AWS::SNS::Topic'}}}",
        "Resources: {'Fn::ForEach::T': [A, [b], {}], T: {Type: 'AWS::SNS::Topic'}}",
    ],
)
def test_what_a_template_hides_is_told(body: str) -> None:
    settings = build_settings([_stack("CreateStack", body)], TABLE)
    assert any("::Template" in word for word in find_differing_settings(settings, {}, {}, {}))


def test_a_deleted_stack_takes_the_settings_of_what_went_with_it() -> None:
    made = replace(
        _stack("CreateStack", _declaring(AutoScalingGroupName="shop", Context="other")),
        created=frozenset({SHOP}),
    )
    deleted = _stack("DeleteStack")
    assert "other" in told_of_stacks(made)
    assert "other" in told_of_stacks(made, deleted), "it is retained"
    assert "other" not in told_of_stacks(made, replace(deleted, removed=frozenset({SHOP})))
    assert "other" not in told_of_stacks(
        made, _stack("UpdateStack", _declaring(AutoScalingGroupName="shop"))
    )


def test_a_stack_that_did_not_make_a_thing_does_not_settle_it() -> None:
    wrong = [*born([SentWrite(MAKE, {"AutoScalingGroupName": "shop", "Context": "other"})])]
    again = _stack("CreateStack", _declaring(AutoScalingGroupName="shop", Context="mine"))
    wanted = [SentWrite(MAKE, {"AutoScalingGroupName": "shop", "Context": "mine"})]
    table = MemberTable(
        {
            MAKE: {"Context": "not kept"},
            "AWS::AutoScaling::AutoScalingGroup": {"Context": "not kept"},
        },
        {MAKE: ["AutoScalingGroupName"]},
        uses=["cloudformation:CreateStack"],
    )
    found = told_of([*wrong, again], wanted, {SHOP: {}}, table)
    assert [word for word in found if "Context" in word and word.startswith((MAKE, "AWS::"))]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ({"Fn::Select": [0, ["shop"]]}, True),
        ({"Fn::Sub": ["sh${x}p", {"x": "o"}]}, True),
        ({"Fn::If": ["Yes", "shop", "n"]}, True),
        ({"Fn::If": ["No", "n", "shop"]}, True),
        ({"Fn::FindInMap": ["Names", "all", "one"]}, True),
        ({"Fn::Join": ["o", {"Fn::Split": ["-", "sh-p"]}]}, True),
        ({"Fn::Select": [{"Ref": "Where"}, ["shop"]]}, False),
        ({"Fn::ImportValue": "shop"}, False),
        ({"Fn::Transform": {"Name": "shop"}}, False),
        ({"Fn::GetAtt": ["Other", "Name"]}, False),
    ],
)
def test_a_name_that_a_function_puts_together_hides_nothing(name: dict, known: bool) -> None:
    resource = {"Type": "AWS::AutoScaling::AutoScalingGroup"}
    group = {**resource, "Properties": {"AutoScalingGroupName": name, "Context": "other"}}
    conditions = {"Yes": {"Fn::Equals": ["a", "a"]}, "No": {"Fn::Not": [{"Condition": "Yes"}]}}
    template = {"Conditions": conditions, "Mappings": {"Names": {"all": {"one": "shop"}}}}
    template["Resources"] = {"Group": group, "Other": {"Type": "AWS::SNS::Topic"}}
    settings = build_settings([_stack("CreateStack", json.dumps(template))], TABLE)
    assert ((("autoscaling", "shop") in settings), known) in ((True, True), (False, False))
    told = [
        word
        for word in find_differing_settings(settings, {}, {SHOP: {}}, {SHOP: {}})
        if "Context = other" in word
    ]
    assert told


def test_what_has_no_value_or_a_condition_that_does_not_hold_is_not_declared() -> None:
    def found(properties: dict, **more: object) -> list:
        group = {"Type": "AWS::AutoScaling::AutoScalingGroup", "Properties": properties, **more}
        conditions = {
            "No": {"Fn::Or": [{"Fn::Equals": ["a", {"Ref": "What"}]}]},
            "Odd": {"Fn::Equals": [{"Ref": "T"}, 1]},
        }
        parameters = {"What": {"Default": "b"}}
        body = {
            "Conditions": conditions,
            "Parameters": parameters,
            "Resources": {"Group": group, "T": {"Type": "X"}},
        }
        return read_declared_resources({"TemplateBody": json.dumps(body)})

    nothing = {"Ref": "AWS::NoValue"}
    group, _ = found(
        {"Context": nothing, "List": [nothing, "a"], "If": {"Fn::If": ["No", "a", nothing]}}
    )
    assert group.properties == {"List": ["a"]}
    assert [one.name for one in found({"Context": "other"}, Condition="No")] == ["T"]
    for condition in ("Odd", "Unknown"):
        with pytest.raises(UnreadTemplate):
            found({}, Condition=condition)


def test_what_a_property_takes_from_its_template_is_as_the_solution_names_it() -> None:
    def told(value: object, wanted: list[SentWrite]) -> list[str]:
        table = MemberTable(
            {
                "AWS::AutoScaling::AutoScalingGroup": {"Context": "not kept"},
                MAKE: {"Context": "not kept"},
            },
            {},
        )
        declared_ = {"AutoScalingGroupName": "shop", "Context": value}
        group = {"Type": "AWS::AutoScaling::AutoScalingGroup", "Properties": declared_}
        resources = {"Resources": {"Group": group, "Topic": {"Type": "AWS::SNS::Topic"}}}
        mine = [_stack("CreateStack", json.dumps(resources))]
        told = told_of(mine, wanted, {("autoscaling", "asgs", "shop"): {}}, table)
        return [word for word in told if word.startswith("AWS::")]

    wanted = [SentWrite(MAKE, {"AutoScalingGroupName": "shop", "Context": "mine"})]
    for value in (
        {"Ref": "Topic"},
        {"Fn::Sub": "x-${Topic}"},
        {"Fn::Sub": "${Topic.Arn}"},
        {"Fn::GetAtt": ["Topic", "A"]},
    ):
        assert not told(value, wanted) and told(value, []), value
    assert told("<of the stack>", wanted), "a text that says so is none"


def test_aliases_do_not_multiply_a_template_without_end() -> None:
    def resources(properties: str) -> dict[str, str]:
        return {
            "TemplateBody": f"Resources: {{Big: {{Type: 'AWS::SNS::Topic', Properties: "
            f"{properties}}}}}"
        }

    lists = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lists += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    body = "\n".join(["Resources:", "  Big:", "    Type: AWS::SNS::Topic", "    Properties:"])
    body += "".join(f"\n      {line}" for line in lists)
    bomb = "\n".join(
        [
            "Parameters:",
            "  P:",
            *(f"    {line}" for line in lists),
            "    Default: *a11",
            resources("{}")["TemplateBody"],
        ]
    )
    long = {"Parameters": [{"ParameterKey": "P", "ParameterValue": "x" * 20_000}]}
    for params in (
        {"TemplateBody": body},
        {"TemplateBody": bomb},
        resources("{A: 0x" + "F" * 20_000 + "}"),
        resources("{A: &a [*a]}"),
        {**resources("{A: !Sub '" + "${P}" * 7000 + "'}"), **long},
        {**resources("{A: !Join [!Ref P, [" + "a, " * 4000 + "a]]}"), **long},
    ):
        with pytest.raises(UnreadTemplate):
            read_declared_resources(params)


@pytest.mark.slow
def test_one_episode_is_read_to_a_bound() -> None:
    body = json.dumps(
        {
            "Resources": {
                "T": {"Type": "AWS::SNS::Topic", "Properties": {str(n): n for n in range(4000)}}
            }
        }
    )
    settings = build_settings([_stack("UpdateStack", body)] * 8, TABLE)
    assert any("::Template" in word for word in find_differing_settings(settings, {}, {}, {}))


def test_drawn_ids_are_those_of_new_resources() -> None:
    def account(*names: str) -> Snapshot:
        return Snapshot({("ec2", "vpcs", f"vpc-{DRAWN}{name}{END_DRAWN}"): {} for name in names})

    (deed,) = build_writes(account("a", "c"), account("a", "b"), [("ec2:CreateVpc", {})])
    assert deed.generated_ids == (("ec2", "vpc-b"),)
    assert (deed.created, deed.removed) == ({("ec2", "vpcs", "vpc-b")}, {("ec2", "vpcs", "vpc-c")})
    key = ("ssm", "parameters", "a")
    before, after = (Snapshot({key: {}}, {key: serial}) for serial in (1, 2))
    (deed,) = build_writes(before, after, [("ssm:PutParameter", {})])
    assert (deed.created, deed.removed) == ({key}, {key}), "it was made anew"


def test_notes_name_file_and_line_of_what_is_none(tmp_path: Path) -> None:
    page = (
        "https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CreateAutoScalingGroup.html"
    )
    entry = (
        "  - {operation: 'autoscaling:CreateAutoScalingGroup', member: %s, value: 1, page: '%s'}\n"
    )
    rest = "steering: {'*': [DryRun]}\ntexts: {'*': [Tags]}\nuses: ['sns:Publish']\n"
    file = tmp_path / "notes.yaml"

    def problem(text: str) -> str:
        file.write_text(text)
        with pytest.raises(TaskError) as caught:
            check_notes(file)
        return str(caught.value)

    file.write_text("defaults:\n" + entry % ("Context", page) + rest)
    check_notes(file)
    assert read_notes(file).defaults == {(MAKE, "Context"): 1}
    told = problem("defaults:\n" + entry % ("Context", page) + entry % ("Contexts", page) + rest)
    assert told == f"{file}:3: botocore's model of {MAKE} has no member Contexts"
    told = problem("defaults:\n" + entry % ("Context", "https://example.com/") + rest)
    assert (
        told == f"{file}:2: the default of {MAKE} Context has no link to a page of "
        f"https://docs.aws.amazon.com/"
    )
    assert problem("defaults: []\n" + rest.replace("sns:Publish", "sns:Print")).startswith(
        f"{file}:4: botocore knows"
    )
    assert "no member Size" in problem(
        "defaults: []\n" + rest.replace("{'*': [Tags]", "{'sns:Publish': [Size]")
    )


@pytest.mark.slow
def test_the_notes_and_the_table_that_come_with_the_package_are_sound() -> None:
    check_notes()
    table = member_table()
    assert table.fate("autoscaling:CreateLaunchConfiguration", ("SpotPrice",)) == "not kept"
    assert table.fate(CHANGE, ("MinSize",)) == "kept"
    assert table.subject(change()) == ("autoscaling", "shop")


def test_an_update_is_about_what_it_names_and_makes_nothing() -> None:
    """Whatever a service drew meanwhile is not what an update is about."""
    drawn = (("lambda", "drawn"), ("ec2", "drawn"))
    made = SentWrite("lambda:CreateEventSourceMapping", {"FunctionName": "f"}, drawn)
    assert member_table().subject(made) == ("lambda", "drawn")
    for operation, params, subject in (
        ("lambda:UpdateEventSourceMapping", {"UUID": "one", "BatchSize": 5}, ("lambda", "one")),
        ("lambda:UpdateAlias", {"FunctionName": "f", "Name": "live"}, ("lambda", "f", "live")),
        ("ec2:ReplaceRoute", {"RouteTableId": "rtb-1", "GatewayId": "igw-1"}, ("ec2", "rtb-1")),
    ):
        assert member_table().subject(SentWrite(operation, params, drawn)) == subject


MEMBERS = (
    "Name",
    "Attributes",
    "AttributeName",
    "AttributeValue",
    "Tags",
    "VersionId",
    "Bucket",
    "TopicName",
)
VALUES = (
    *(
        None,
        "",
        [],
        {},
        "x",
        1,
        2.5,
        True,
        b"x",
        "[",
        '{"a":1}',
        {"": "a"},
        {1: 2},
        {"Ref": "T"},
        {"Fn::Sub": "${T}"},
    ),
    *(
        [{"Name": "n", "Value": "v"}],
        {"Attributes": {}},
        {"AttributeName": "x", "AttributeValue": "y"},
        "<unknown>",
    ),
)
NAMES = ("shop", "vpc-1", "arn:aws:sns:us-east-1:000000000000:shop")
KEYS = (
    ("sns", "topics", "shop"),
    ("ec2", "vpcs", "vpc-1"),
    ("s3", "buckets", "shop"),
    ("sqs", "queues", "q/shop"),
)
OPERATIONS = (
    *json.loads(TABLE_FILE.read_text())["operations"],
    *(["cloudformation:CreateStack"] * 40),
)


def drawn_deeds(draw: random.Random) -> list[SentWrite]:
    """Return a few requests of any operation with any parameters, and what may come and go with
    them."""
    found = []
    for _ in range(draw.randint(1, 8)):
        operation = draw.choice(OPERATIONS)
        params = {
            member: draw.choice(VALUES) for member in draw.sample(MEMBERS, draw.randint(0, 4))
        }
        names = [member for member in member_table().about(SentWrite(operation, {})) if member]
        params |= {
            member: draw.choice(["shop", "vpc-1", "arn:aws:sns:us-east-1:000000000000:shop"])
            for member in names
        }
        if operation == "cloudformation:CreateStack":
            declared_ = {member: draw.choice(VALUES[:7]) for member in draw.sample(MEMBERS, 3)}
            resources = {
                "T": {"Type": draw.choice(["AWS::SNS::Topic", "A", 5]), "Properties": declared_}
            }
            params["TemplateBody"] = draw.choice(["{", json.dumps({"Resources": resources})])
        made = ((operation.partition(":")[0], "vpc-1"),) if draw.random() < 0.3 else ()
        came, went = (frozenset(draw.sample(KEYS, draw.randint(0, 2))) for _ in range(2))
        found.append(SentWrite(operation, params, made, came, went))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_any_requests_can_be_read_and_are_as_themselves(seed: int) -> None:
    table = member_table()
    account = {key: {"Name": "x", "attributes": {"a": 1}} for key in KEYS}
    for number in range(30):
        draw = random.Random(seed * 1000 + number)
        deeds = drawn_deeds(draw)
        mine = build_settings(deeds, table)
        find_differing_settings(mine, build_settings(drawn_deeds(draw), table), account, account)
        told = find_differing_settings(mine, build_settings(deeds, table), account, account)
        assert not [word for word in told if "::Template" not in word], deeds
