"""What members mean: the tables name what botocore's models know, and nothing else is harmless."""

import json
from collections.abc import Iterator

import botocore.loaders
import pytest
import yaml

from realhf.aws.grading import meanings, snapshot
from realhf.aws.grading.differences import canonical
from realhf.aws.grading.meanings import (
    KeptAttributes,
    MemberPosition,
    derive,
    holds_tags,
    is_setting,
    only_describes,
)
from realhf.aws.grading.snapshot import snapshot_of

TABLES = yaml.safe_load(
    meanings.resources.files("realhf.aws.grading").joinpath("meanings.yaml").read_text()
)
LOADER = botocore.loaders.create_loader()


def types_of(service: str, member: str) -> set[str]:
    """Return the types that a service's model has for members of this name, in any case."""
    shapes = LOADER.load_service_model(service, "service-2")["shapes"]
    named = [
        inner["shape"]
        for shape in shapes.values()
        for name, inner in shape.get("members", {}).items()
        if name.lower() == member.lower()
    ]
    return {shapes[shape]["type"] for shape in named}


def written(table: str) -> Iterator[tuple[str, str]]:
    for kind, paths in TABLES[table].items():
        for path in [paths] if isinstance(paths, str) else paths:
            yield kind, path


@pytest.mark.parametrize(("kind", "path"), written("descriptions"))
def test_a_description_is_a_text_in_the_services_model(kind: str, path: str) -> None:
    assert "string" in types_of(kind.partition("/")[0], path.rpartition("/")[2])


@pytest.mark.parametrize(("kind", "path"), written("tags"))
def test_tags_are_a_list_or_a_map_in_the_services_model(kind: str, path: str) -> None:
    assert types_of(kind.partition("/")[0], path.rpartition("/")[2]) & {"list", "map"}


@pytest.mark.parametrize(
    ("key", "path", "harmless"),
    [
        (("dynamodb", "tables", "t"), "SSEDescription/KMSMasterKeyArn", False),
        (("dynamodb", "tables", "t"), "Description", False),
        (("ecs", "services", "c/s"), "enableECSManagedTags", False),
        (("backup", "selections", "s"), "ListOfTags[]", False),
        (("events", "rules", "r"), "Description", True),
        (("events", "rules", "r"), "EventPattern/{document}/Description", False),
        (("events", "rules", "r"), "More/Description", False),
        (("lambda", "functions", "f"), "aliases/stable/Description", True),
        (("lambda", "functions", "f"), "config/Environment/Variables/{document}/tags", False),
        (("lambda", "functions", "f"), "tags/a/b", True),
        (("iam", "roles", "r"), "Tags[]", True),
        (("iam", "roles", "r"), "Tags", False),
        (("ec2", "tags", "i-1"), "[]", True),
    ],
)
def test_harmless_text_is_named_exactly(
    key: tuple[str, str, str], path: str, harmless: bool
) -> None:
    assert only_describes(key, path) is harmless


def test_kinds_are_named_exactly() -> None:
    assert is_setting(("s3", "bucket_policies", "b")) and is_setting(("s3", "bucket_tags", "b"))
    assert not is_setting(("s3", "buckets", "b")) and not is_setting(("iam", "policies", "p"))
    assert holds_tags(("s3", "bucket_tags", "b")) and not holds_tags(("x", "bucket_tags", "b"))


DEFAULTS = [
    (kind, default) for kind, defaults in TABLES["defaults"].items() for default in defaults
]


ATTRIBUTES = {
    *(
        "FifoTopic",
        "TracingConfig",
        "FifoThroughputScope",
        "MaximumMessageSize",
        "SignatureVersion",
    ),
    *("FilterPolicyScope", "SqsManagedSseEnabled", "redrivePermission"),
    *("EnableDnsSupport", "EnableDnsHostnames", "content_type", "s3_object_storage_mode"),
}
"""Keys of maps and documents of attributes, of operations of their own, and of the simulator: no
model has them."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "default"), DEFAULTS)
def test_a_default_is_a_member_of_the_services_model_with_the_page_of_aws(
    kind: str, default: dict
) -> None:
    service = kind.partition("/")[0]
    member = default["path"].rpartition("/")[2].removesuffix("[]")
    assert set(default) - {"where"} == {"path", "is", "aws"} and isinstance(default["is"], str)
    assert default["aws"].startswith("https://docs.aws.amazon.com/")
    assert types_of(service, member) or member in ATTRIBUTES


def set_at(steps: list[str], value: object) -> object:
    """Return a resource that says a value at the steps of a path."""
    if not steps:
        return value
    step = steps[0].removesuffix("[]").replace("*", "any")
    inner = set_at(steps[1:], value)
    return {step: [inner] if steps[0].endswith("[]") else inner}


@pytest.mark.parametrize(("kind", "default"), DEFAULTS)
def test_another_value_than_the_default_stays(kind: str, default: dict) -> None:
    usual = "default" if "{" in default["is"] else default["is"]
    wheres = {path: value for path, value in default.get("where", {}).items() if value}
    resource = set_at(default["path"].split("/"), f"{usual}-other")
    assert isinstance(resource, dict)
    for path, value in wheres.items():
        held = resource
        *above, last = path.split("/")
        for step in above:
            held = held.setdefault(step, {})
        held[last] = value
    assert f"{usual}-other" in json.dumps(meanings.drop_defaults(kind, resource))


def alarm(**more: object) -> dict:
    return {"EvaluationPeriods": 2, "Namespace": "AWS/EC2", "MetricName": "CPUUtilization", **more}


def pool(**policy: object) -> dict:
    return {"Policies": {"PasswordPolicy": {"MinimumLength": 8, **policy}}}


def invited(**more: object) -> dict:
    return {"AdminCreateUserConfig": {"AllowAdminCreateUserOnly": False, **more}}


EFS = "alias/aws/elasticfilesystem"


def encrypted(**more: object) -> dict:
    return {"Encrypted": True, **more}


USUAL_DELIVERY = {
    "BufferingHints": {"SizeInMBs": 5, "IntervalInSeconds": 300},
    "EncryptionConfiguration": {"NoEncryptionConfig": "NoEncryption"},
    "S3BackupMode": "Disabled",
}


def delivery(**more: object) -> dict:
    return {"destinations": [{"id": "d", "config": {"BucketARN": "b", **more}}]}


def rule(**more: object) -> dict:
    return {"IpPermissions": [{"FromPort": 1, "IpRanges": [{"CidrIp": "10.0.0.0/8", **more}]}]}


def check(**more: object) -> dict:
    return {"config": {"Type": "HTTPS", **more}}


def plan(**more: object) -> dict:
    return {"BackupPlan": {"Rules": [{"RuleName": "r", **more}]}}


USUAL_BACKUP = {
    "StartWindowMinutes": 480,
    "CompletionWindowMinutes": 10080,
    "ScheduleExpressionTimezone": "Etc/UTC",
}


def client(**more: object) -> dict:
    return {"_clients": {"c": {"ClientName": "c", **more}}}


USUAL_FLOWS = ["ALLOW_USER_SRP_AUTH", "ALLOW_CUSTOM_AUTH", "ALLOW_REFRESH_TOKEN_AUTH"]


def port(mode: str = "awsvpc", **more: object) -> dict:
    return {
        "networkMode": mode,
        "containerDefinitions": [{"name": "a", "portMappings": [{"containerPort": 80, **more}]}],
    }


def logged(**more: object) -> dict:
    return {"config": {"FunctionName": "f", "LoggingConfig": more}}


def published(**more: object) -> dict:
    version = {"config": {"FunctionName": "f", "Timeout": 3, "LoggingConfig": more}}
    return {"config": {"FunctionName": "f"}, "versions": {"1": version}}


def built(**more: object) -> dict:
    return {"name": "p", "environment": {"type": "LINUX_CONTAINER", **more}}


def stored(**more: object) -> dict:
    return {"Engine": "mysql", "StorageEncrypted": True, **more}


@pytest.mark.parametrize(
    ("service", "kind", "one", "other", "equal"),
    [
        ("backup", "plans", plan(**USUAL_BACKUP), plan(), True),
        ("backup", "plans", plan(StartWindowMinutes=60), plan(), False),
        ("codebuild", "projects", built(imagePullCredentialsType="CODEBUILD"), built(), True),
        ("codebuild", "projects", built(imagePullCredentialsType="SERVICE_ROLE"), built(), False),
        ("cognito-idp", "user_pools", client(AccessTokenValidity=1), client(), True),
        (
            "cognito-idp",
            "user_pools",
            client(AccessTokenValidity=1, TokenValidityUnits={"AccessToken": "hours"}),
            client(),
            True,
        ),
        (
            "cognito-idp",
            "user_pools",
            client(AccessTokenValidity=1, TokenValidityUnits={"AccessToken": "days"}),
            client(TokenValidityUnits={"AccessToken": "days"}),
            False,
        ),
        ("cognito-idp", "user_pools", client(ExplicitAuthFlows=USUAL_FLOWS), client(), True),
        ("cognito-idp", "user_pools", client(ExplicitAuthFlows=USUAL_FLOWS[:2]), client(), False),
        ("ecs", "task_defs", port(hostPort=80, protocol="tcp"), port(), True),
        ("ecs", "task_defs", port(hostPort=81), port(), False),
        ("ecs", "task_defs", port("bridge", hostPort=80), port("bridge"), False),
        ("lambda", "functions", logged(LogFormat="Text", LogGroup="/aws/lambda/f"), logged(), True),
        ("lambda", "functions", logged(LogGroup="/aws/lambda/g"), logged(), False),
        (
            "lambda",
            "functions",
            logged(LogFormat="JSON", SystemLogLevel="INFO"),
            logged(LogFormat="JSON"),
            True,
        ),
        ("lambda", "functions", logged(SystemLogLevel="INFO"), logged(), False),
        (
            "lambda",
            "functions",
            published(LogFormat="Text", LogGroup="/aws/lambda/f"),
            published(),
            True,
        ),
        ("lambda", "functions", published(LogGroup="/aws/lambda/g"), published(), False),
        ("rds", "instances", stored(KmsKeyId="alias/aws/rds"), stored(), True),
        ("rds", "instances", stored(KmsKeyId="alias/mine"), stored(), False),
        ("cloudwatch", "alarms", alarm(DatapointsToAlarm=2), alarm(), True),
        ("cloudwatch", "alarms", alarm(DatapointsToAlarm=1), alarm(), False),
        ("cloudwatch", "alarms", alarm(Unit="Percent"), alarm(), True),
        (
            "cloudwatch",
            "alarms",
            alarm(Unit="Percent", MetricName="NetworkIn"),
            alarm(MetricName="NetworkIn"),
            False,
        ),
        ("cognito-idp", "user_pools", pool(RequireNumbers=False), pool(), True),
        ("cognito-idp", "user_pools", pool(RequireNumbers=True), pool(), False),
        ("cognito-idp", "user_pools", invited(UnusedAccountValidityDays=7), invited(), True),
        ("cognito-idp", "user_pools", invited(UnusedAccountValidityDays=8), invited(), False),
        (
            "efs",
            "file_systems",
            encrypted(KmsKeyId=EFS, PerformanceMode="generalPurpose"),
            encrypted(),
            True,
        ),
        ("efs", "file_systems", encrypted(KmsKeyId="alias/mine"), encrypted(), False),
        ("efs", "file_systems", {"n": 1, "KmsKeyId": EFS}, {"n": 1}, False),
        ("firehose", "streams", delivery(**USUAL_DELIVERY), delivery(), True),
        ("firehose", "streams", delivery(BufferingHints={"SizeInMBs": 1}), delivery(), False),
        ("firehose", "streams", delivery(S3BackupMode="Enabled"), delivery(), False),
        (
            "secretsmanager",
            "secrets",
            {"n": 1, "KmsKeyId": "alias/aws/secretsmanager"},
            {"n": 1},
            True,
        ),
        ("secretsmanager", "secrets", {"n": 1, "KmsKeyId": "alias/mine"}, {"n": 1}, False),
        ("ec2", "security_groups", rule(Description="mine"), rule(), True),
        ("ec2", "security_groups", rule(Ipv6="mine"), rule(), False),
        ("route53", "health_checks", check(EnableSNI=True), check(), True),
        ("route53", "health_checks", check(EnableSNI=False), check(), False),
        ("route53", "health_checks", check(Type="HTTP", EnableSNI=True), check(Type="HTTP"), False),
        (
            "events",
            "targets",
            [{"Id": "a", "RetryPolicy": {"MaximumRetryAttempts": 185}}],
            [{"Id": "a"}],
            True,
        ),
        (
            "events",
            "targets",
            [{"Id": "a", "RetryPolicy": {"MaximumRetryAttempts": 0}}],
            [{"Id": "a"}],
            False,
        ),
        ("sqs", "queues", {"attributes": {"SqsManagedSseEnabled": "true"}, "n": 1}, {"n": 1}, True),
        (
            "sqs",
            "queues",
            {"attributes": {"SqsManagedSseEnabled": "false"}, "n": 1},
            {"n": 1},
            False,
        ),
        ("logs", "metric_filters", {"filterPattern": '"ERROR"'}, {"filterPattern": "ERROR"}, True),
        (
            "logs",
            "metric_filters",
            {"filterPattern": '"AN ERROR"'},
            {"filterPattern": "AN ERROR"},
            False,
        ),
        ("s3", "buckets", {"EnableDnsSupport": "true"}, {}, False),
    ],
)
def test_a_default_given_is_as_good_as_none(
    service: str, kind: str, one: object, other: object, equal: bool
) -> None:
    assert (read(service, kind, one) == read(service, kind, other)) is equal


def tagged(*tags: str) -> dict:
    """A selection of AWS Backup by its list of tags."""
    return {
        "ListOfTags": [
            {"ConditionType": "STRINGEQUALS", "ConditionKey": t, "ConditionValue": "v"}
            for t in tags
        ]
    }


def limited(*tags: str, operator: str = "StringEquals", **more: object) -> dict:
    """A selection of AWS Backup by conditions."""
    asked = [{"ConditionKey": f"aws:ResourceTag/{tag}", "ConditionValue": "v"} for tag in tags]
    return {"Resources": ["*"], "Conditions": {operator: asked, "StringLike": []}, **more}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (tagged("a"), limited("a"), True),
        (tagged("a"), {"Conditions": limited("a")["Conditions"]}, True),
        (tagged("a"), limited("b"), False),
        (tagged("a", "b"), limited("a", "b"), False),
        (tagged("a"), limited("a", operator="StringNotEquals"), False),
        (tagged("a"), limited("a", Resources=["arn:aws:s3:::b"]), False),
        (tagged("a"), limited("a", NotResources=["arn:aws:s3:::b"]), False),
        (tagged("a"), limited("a", **tagged("b")), False),
    ],
)
def test_a_backup_of_one_tag_may_be_a_list_or_a_condition(
    one: dict, other: dict, equal: bool
) -> None:
    assert (read("backup", "selections", one) == read("backup", "selections", other)) is equal


IN_XML = {"CORSRule": "CORSRules", "RoutingRule": "RoutingRules"}
"""Names of S3's lists in its documents, whose elements bear them."""


@pytest.mark.parametrize(("service", "member"), written("ordered"))
def test_what_has_an_order_is_a_list_in_the_services_model(service: str, member: str) -> None:
    assert types_of(service, IN_XML.get(member, member)) & {"list"}


def read(service: str, kind: str, value: object) -> str:
    """What a resource says, and what lies within it, in the form that equal ones share."""
    resources = snapshot_of([json.dumps([service, kind, "", "x", 1, value])], 1.7e9).resources
    return "\n".join(
        f"{key} {canonical(held, MemberPosition.of(key))}"
        for key, held in sorted(resources.items())
    )


def columns(*names: str) -> dict:
    return {"Columns": [{"Name": name} for name in names]}


def definition(seconds: object, *branches: str) -> dict:
    return {"definition": json.dumps({"Seconds": seconds, "Branches": branches})}


def pattern(*sources: object) -> dict:
    return {"EventPattern": json.dumps({"source": sources})}


def container(**more: object) -> dict:
    return {"containerDefinitions": [{"name": "app", **more}]}


def item(**more: object) -> dict:
    return {"items": {"a": {"id": {"S": "a"}, **more}}}


def redrive(count: object) -> dict:
    return {"attributes": {"RedrivePolicy": json.dumps({"maxReceiveCount": count})}}


@pytest.mark.parametrize(
    ("service", "kind", "one", "other", "equal"),
    [
        ("glue", "tables", columns("a", "b"), columns("b", "a"), False),
        ("events", "rules", pattern("a", "b"), pattern("b", "a"), True),
        ("events", "rules", pattern(1), pattern("1"), False),
        ("stepfunctions", "state_machines", definition(30), definition("30"), False),
        ("stepfunctions", "state_machines", definition(30), definition(30.0), True),
        (
            "stepfunctions",
            "state_machines",
            definition(1, "a", "b"),
            definition(1, "b", "a"),
            False,
        ),
        ("sqs", "queues", redrive(4), redrive("4"), True),
        (
            "sqs",
            "queues",
            {"attributes": {"DelaySeconds": 4}},
            {"attributes": {"DelaySeconds": "4"}},
            True,
        ),
        ("ecs", "task_defs", container(entryPoint=[""]), container(), False),
        ("ecs", "task_defs", container(entryPoint=[]), container(), True),
        ("ecs", "task_defs", container(command=["a", "b"]), container(command=["b", "a"]), False),
        ("ecs", "task_defs", container(links=["a", "b"]), container(links=["b", "a"]), True),
        ("dynamodb", "tables", item(more={"L": []}), item(), False),
        ("dynamodb", "tables", item(more={"L": []}), item(more={"M": {}}), False),
        ("dynamodb", "tables", item(more={"SS": ["a", "b"]}), item(more={"SS": ["b", "a"]}), True),
        ("dynamodb", "tables", item(more={"L": ["a", "b"]}), item(more={"L": ["b", "a"]}), False),
        ("s3", "bucket_notifications", "<N><EventBridgeConfiguration/></N>", "<N/>", False),
        ("s3", "bucket_notifications", "<N><TopicConfiguration/></N>", "<N/>", True),
    ],
)
def test_types_decide_what_is_equal(
    service: str, kind: str, one: object, other: object, equal: bool
) -> None:
    assert (read(service, kind, one) == read(service, kind, other)) is equal


def test_structures_without_members_are_those_of_the_model() -> None:
    shapes = LOADER.load_service_model("s3", "service-2")["shapes"]
    empty = {
        name
        for shape in shapes.values()
        for name, inner in shape.get("members", {}).items()
        if shapes[inner["shape"]]["type"] == "structure"
        and not shapes[inner["shape"]].get("members")
    }
    assert empty - {"Cont", "End", "Parquet"} == snapshot.STRUCTURES_WITHOUT_MEMBERS, (
        "the others are answers"
    )


def test_what_is_derived_is_computed_once_for_kept_attributes_alone() -> None:
    computed = []

    def compute() -> int:
        computed.append(1)
        return len(computed)

    kept = KeptAttributes({"Name": "a"})
    assert [derive(kept, "count", compute), derive(kept, "count", compute)] == [1, 1]
    assert derive(kept, "other", compute) == 2 and derive({"Name": "a"}, "count", compute) == 3
    assert kept == {"Name": "a"}
