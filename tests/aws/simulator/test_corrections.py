"""Each correction of MiniStack, against a real simulator by command lines as an agent writes
them."""

import json
import time
from collections.abc import Callable

import pytest

from realhf.aws.simulator.corrections import MAX_POLL_S
from realhf.aws.simulator.slot import Slot

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.fixture
def aws(slot: Slot) -> Callable[[str], tuple[int, str, str]]:
    """Run a command line in an empty account; returns exit code, output and error."""
    slot.reset(1)

    def run(line: str) -> tuple[int, str, str]:
        result = slot.executor.run(f"aws {line}")
        return result.exit_code, result.stdout.strip(), " ".join(result.stderr.split())

    return run


def test_a_poll_of_an_empty_queue_answers_empty_within_two_seconds(aws) -> None:
    """It ended in "Read timeout" after eight seconds, a failed command."""
    url = json.loads(aws("sqs create-queue --queue-name q")[1])["QueueUrl"]
    for wait in ("--wait-time-seconds 20", ""):
        begun = time.monotonic()
        assert aws(f"sqs receive-message --queue-url {url} {wait}") == (0, "", ""), wait
        assert time.monotonic() - begun < MAX_POLL_S + 1
        assert (
            aws(
                f"sqs set-queue-attributes --queue-url {url} --attributes "
                f"ReceiveMessageWaitTimeSeconds=20"
            )[0]
            == 0
        )
    assert (
        "InvalidParameterValue"
        in aws(f"sqs receive-message --queue-url {url} --wait-time-seconds 21")[2]
    )
    aws(f"sqs send-message --queue-url {url} --message-body here")
    assert (
        json.loads(aws(f"sqs receive-message --queue-url {url}")[1])["Messages"][0]["Body"]
        == "here"
    )


def test_groups_of_the_default_vpc_are_known_by_name(aws) -> None:
    """Every group was described, nothing deleted, and rules by name failed."""
    for name in ("web", "db"):
        assert aws(f"ec2 create-security-group --group-name {name} --description {name}")[0] == 0
    described = json.loads(aws("ec2 describe-security-groups --group-names web")[1])[
        "SecurityGroups"
    ]
    assert [group["GroupName"] for group in described] == ["web"]
    assert (
        "InvalidGroup.NotFound" in aws("ec2 describe-security-groups --group-names web nothing")[2]
    )
    assert (
        aws(
            "ec2 authorize-security-group-ingress --group-name web --protocol tcp --port 22 --cidr "
            "10.0.0.0/8"
        )[0]
        == 0
    )
    assert (
        aws(
            "ec2 authorize-security-group-ingress --group-name db --protocol tcp --port 1 "
            "--source-group web"
        )[0]
        == 0
    )
    sources = "--query SecurityGroups[].IpPermissions[].UserIdGroupPairs[]"
    pairs = json.loads(aws(f"ec2 describe-security-groups --group-names db {sources}")[1])
    assert [(pair["GroupId"], "GroupName" in pair) for pair in pairs] == [
        (described[0]["GroupId"], False)
    ]
    assert (
        aws(
            "ec2 revoke-security-group-ingress --group-name web --protocol tcp --port 22 --cidr "
            "10.0.0.0/8"
        )[0]
        == 0
    )
    assert (
        "[]"
        in aws(
            "ec2 describe-security-groups --group-names web --query "
            "SecurityGroups[].IpPermissions[]"
        )[1]
    )
    assert aws("ec2 delete-security-group --group-name web")[0] == 0
    for what in (
        "delete-security-group",
        "revoke-security-group-ingress --protocol tcp --port 1 --cidr 10.0.0.0/8",
    ):
        assert "InvalidGroup.NotFound" in aws(f"ec2 {what} --group-name web")[2], what
    assert "MissingParameter" in aws("ec2 delete-security-group")[2]


def test_a_group_of_another_vpc_is_not_known_by_name(aws) -> None:
    vpc = json.loads(aws("ec2 create-vpc --cidr-block 10.9.0.0/16")[1])["Vpc"]["VpcId"]
    aws(f"ec2 create-security-group --group-name far --description far --vpc-id {vpc}")
    assert "InvalidGroup.NotFound" in aws("ec2 describe-security-groups --group-names far")[2]
    assert "InvalidGroup.NotFound" in aws("ec2 delete-security-group --group-name far")[2]


def test_a_rule_that_is_not_there_is_not_revoked(aws) -> None:
    """It was answered as done. In the default VPC AWS lists what is unknown and has no error."""
    vpc = json.loads(aws("ec2 create-vpc --cidr-block 10.9.0.0/16")[1])["Vpc"]["VpcId"]
    far = json.loads(
        aws(f"ec2 create-security-group --group-name far --description far --vpc-id {vpc}")[1]
    )["GroupId"]
    near = json.loads(aws("ec2 create-security-group --group-name near --description near")[1])[
        "GroupId"
    ]
    two = "IpProtocol=tcp,FromPort=1,ToPort=2,IpRanges=[{CidrIp=10.0.0.0/8},{CidrIp=11.0.0.0/8}]"
    for group in (far, near):
        aws(f"ec2 authorize-security-group-ingress --group-id {group} --ip-permissions '{two}'")
    rule = "--protocol tcp --port 1-2 --cidr"
    assert (
        "InvalidPermission.NotFound"
        in aws(f"ec2 revoke-security-group-ingress --group-id {far} {rule} 12.0.0.0/8")[2]
    )
    code, answer, _ = aws(f"ec2 revoke-security-group-ingress --group-id {near} {rule} 12.0.0.0/8")
    assert code == 0 and json.loads(answer)["UnknownIpPermissions"][0]["IpRanges"] == [
        {"CidrIp": "12.0.0.0/8"}
    ]
    every = "--ip-permissions 'IpProtocol=-1,IpRanges=[{CidrIp=0.0.0.0/0}]'"
    assert aws(f"ec2 revoke-security-group-egress --group-id {far} {every}")[0] == 0
    assert (
        "InvalidPermission.NotFound"
        in aws(f"ec2 revoke-security-group-egress --group-id {far} {every}")[2]
    )


def test_one_range_of_a_rule_is_revoked(aws) -> None:
    """A rule was found only where all its ranges were named."""
    group = json.loads(aws("ec2 create-security-group --group-name g --description g")[1])[
        "GroupId"
    ]
    two = "IpProtocol=tcp,FromPort=1,ToPort=2,IpRanges=[{CidrIp=10.0.0.0/8,Description=d},{CidrIp=11.0.0.0/8}]"
    aws(f"ec2 authorize-security-group-ingress --group-id {group} --ip-permissions '{two}'")
    answer = aws(
        f"ec2 revoke-security-group-ingress --group-id {group} --protocol 6 --port 1-2 --cidr "
        f"10.0.0.0/8"
    )[1]
    assert [rule["CidrIpv4"] for rule in json.loads(answer)["RevokedSecurityGroupRules"]] == [
        "10.0.0.0/8"
    ]
    query = f"--group-ids {group} --query SecurityGroups[].IpPermissions[].IpRanges[].CidrIp"
    assert json.loads(aws(f"ec2 describe-security-groups {query}")[1]) == ["11.0.0.0/8"]


def test_a_group_keeps_its_capacity_within_its_bounds(aws) -> None:
    """Any was taken, and a new minimum left it where it was."""
    aws(
        "autoscaling create-launch-configuration --launch-configuration-name l --image-id ami-1 "
        "--instance-type t3.nano"
    )
    group = "--auto-scaling-group-name g"
    made = "--launch-configuration-name l --min-size 0 --max-size 1 --availability-zones us-east-1a"
    aws(f"autoscaling create-auto-scaling-group {group} {made}")

    def capacity() -> int:
        answer = aws("autoscaling describe-auto-scaling-groups --auto-scaling-group-names g")[1]
        return json.loads(answer)["AutoScalingGroups"][0]["DesiredCapacity"]

    for sizes in ("--desired-capacity 2", "--min-size 2 --max-size 4 --desired-capacity 1"):
        assert "ValidationError" in aws(f"autoscaling update-auto-scaling-group {group} {sizes}")[2]
    assert aws(f"autoscaling update-auto-scaling-group {group} --min-size 2 --max-size 4")[0] == 0
    assert capacity() == 2
    assert aws(f"autoscaling update-auto-scaling-group {group} --desired-capacity 3")[0] == 0
    assert capacity() == 3


def test_all_of_a_group_is_updated(aws) -> None:
    """Zones, launch template and protection were dropped, and a template named by its id had no
    name."""
    made = json.loads(
        aws(
            "ec2 create-launch-template --launch-template-name web --launch-template-data "
            "ImageId=ami-1"
        )[1]
    )
    template = {
        "LaunchTemplateId": made["LaunchTemplate"]["LaunchTemplateId"],
        "LaunchTemplateName": "web",
    }
    aws(
        "autoscaling create-launch-configuration --launch-configuration-name l --image-id ami-1 "
        "--instance-type t3.nano"
    )
    bounds = "--min-size 1 --max-size 2 --availability-zones us-east-1a"

    def group(name: str) -> dict:
        described = aws(
            f"autoscaling describe-auto-scaling-groups --auto-scaling-group-names {name}"
        )[1]
        return json.loads(described)["AutoScalingGroups"][0]

    for name, named in {
        "one": f"LaunchTemplateId={template['LaunchTemplateId']}",
        "two": "LaunchTemplateName=web",
    }.items():
        create = f"autoscaling create-auto-scaling-group --auto-scaling-group-name {name} {bounds}"
        assert aws(f"{create} --launch-template {named},Version=1")[0] == 0
        assert (
            group(name)["LaunchTemplate"]
            == {**template, "Version": "1"}
            == group(name)["Instances"][0]["LaunchTemplate"]
        )
    update = "autoscaling update-auto-scaling-group --auto-scaling-group-name one"
    more = "--availability-zones us-east-1b us-east-1c --new-instances-protected-from-scale-in"
    assert (
        aws(f"{update} --launch-configuration-name l {more} --termination-policies OldestInstance")[
            0
        ]
        == 0
    )
    found = group("one")
    assert (found["LaunchConfigurationName"], found.get("LaunchTemplate")) == ("l", None)
    assert found["AvailabilityZones"] == ["us-east-1b", "us-east-1c"]
    assert [machine["AvailabilityZone"] for machine in found["Instances"]] == ["us-east-1b"]
    assert (found["NewInstancesProtectedFromScaleIn"], found["TerminationPolicies"]) == (
        True,
        ["OldestInstance"],
    )
    assert aws(f"{update} --launch-template LaunchTemplateName=web --min-size 2")[0] == 0
    found = group("one")
    assert (
        found["LaunchTemplate"] == {**template, "Version": "$Default"}
        and not found["LaunchConfigurationName"]
    )
    assert aws(f"{update} --availability-zones us-east-1d --desired-capacity 9")[0] != 0
    assert group("one")["AvailabilityZones"] == ["us-east-1b", "us-east-1c"], (
        "what is refused changes nothing"
    )


def test_a_group_starts_in_the_same_zones_however_they_are_listed(aws) -> None:
    """The first machine started in the zone that was named first."""
    aws(
        "autoscaling create-launch-configuration --launch-configuration-name l --image-id ami-1 "
        "--instance-type t3.nano"
    )
    groups = {"one": "us-east-1a us-east-1b", "other": "us-east-1b us-east-1a"}
    for group, zones in groups.items():
        made = (
            f"--launch-configuration-name l --min-size 1 --max-size 3 --availability-zones {zones}"
        )
        assert (
            aws(f"autoscaling create-auto-scaling-group --auto-scaling-group-name {group} {made}")[
                0
            ]
            == 0
        )

    def used() -> list[list[str]]:
        answer = json.loads(aws("autoscaling describe-auto-scaling-groups")[1])["AutoScalingGroups"]
        return [[machine["AvailabilityZone"] for machine in group["Instances"]] for group in answer]

    assert used() == [["us-east-1a"]] * 2
    for group in groups:
        assert (
            aws(
                f"autoscaling update-auto-scaling-group --auto-scaling-group-name {group} "
                f"--desired-capacity 3"
            )[0]
            == 0
        )
    assert used() == [["us-east-1a", "us-east-1b", "us-east-1a"]] * 2


def test_a_parameter_group_of_another_family_is_refused(aws) -> None:
    """It was taken whatever the version."""
    family = "--db-parameter-group-family postgres16 --description d"
    aws(f"rds create-db-parameter-group --db-parameter-group-name p {family}")
    made = (
        "--engine postgres --db-instance-class db.t3.micro --allocated-storage 20 "
        "--master-username app"
    )
    create = (
        f"rds create-db-instance --db-instance-identifier d {made} --master-user-password "
        f"long-enough"
    )
    for version in ("", " --engine-version 15.3"):
        refused = aws(f"{create} --db-parameter-group-name p{version}")
        assert "InvalidParameterCombination" in refused[2], version
    assert aws(f"{create} --db-parameter-group-name p --engine-version 16.4")[0] == 0


def test_a_listener_forwards_to_one_group_in_either_form(aws) -> None:
    """The longer form was dropped, and the listener forwarded nowhere."""
    subnets = json.loads(aws("ec2 describe-subnets --query Subnets[].SubnetId")[1])
    made = json.loads(aws(f"elbv2 create-load-balancer --name b --subnets {' '.join(subnets)}")[1])
    balancer = made["LoadBalancers"][0]["LoadBalancerArn"]
    group = "elbv2 create-target-group --protocol HTTP --port 80 --vpc-id vpc-00000001 --name"
    groups = [
        json.loads(aws(f"{group} {name}")[1])["TargetGroups"][0]["TargetGroupArn"]
        for name in ("one", "two")
    ]
    for port, weights, right in (
        (80, {0: 1}, True),
        (81, {0: 0}, False),
        (82, {0: 1, 1: 1}, False),
    ):
        parts = [
            {"TargetGroupArn": groups[place], "Weight": weight} for place, weight in weights.items()
        ]
        action = json.dumps([{"Type": "forward", "ForwardConfig": {"TargetGroups": parts}}])
        create = (
            f"elbv2 create-listener --load-balancer-arn {balancer} --protocol HTTP --port {port}"
        )
        answer = json.loads(aws(f"{create} --default-actions '{action}'")[1])
        assert (
            answer["Listeners"][0]["DefaultActions"][0].get("TargetGroupArn") == groups[0]
        ) is right, weights


def test_a_stack_makes_what_a_request_would(aws) -> None:
    """A topic could be used by anybody, and a table billed by request was provisioned."""
    keys: dict[str, object] = {
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}]
    }
    keys |= {"BillingMode": "PAY_PER_REQUEST", "TableName": "t"}
    keys["KeySchema"] = [{"AttributeName": "id", "KeyType": "HASH"}]
    subscription = {
        "TopicArn": {"Ref": "T"},
        "Protocol": "sqs",
        "Endpoint": "arn:aws:sqs:us-east-1:000000000000:q",
    }
    template = {
        "T": {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": "by-stack"}},
        "S": {"Type": "AWS::SNS::Subscription", "Properties": subscription},
        "D": {
            "Type": "AWS::DynamoDB::Table",
            "Properties": {"BillingMode": "PAY_PER_REQUEST", "TableName": "t", **keys},
        },
    }
    body = json.dumps({"Resources": template})
    assert aws(f"cloudformation create-stack --stack-name s --template-body '{body}'")[0] == 0
    aws("sns create-topic --name by-request")
    arn = "arn:aws:sns:us-east-1:000000000000"
    endpoint = f"--notification-endpoint {subscription['Endpoint']}"
    aws(f"sns subscribe --topic-arn {arn}:by-request --protocol sqs {endpoint}")
    topics = ("by-stack", "by-request")
    told = [
        aws(f"sns get-topic-attributes --topic-arn {arn}:{name}")[1].replace(name, "x")
        for name in topics
    ]
    assert json.loads(told[0]) == json.loads(told[1])
    table = json.loads(aws("dynamodb describe-table --table-name t")[1])["Table"]
    assert table["ProvisionedThroughput"]["ReadCapacityUnits"] == 0


def test_machines_are_started_in_groups_by_name(aws) -> None:
    """Names were ignored, and the machine was in the default group."""
    aws("ec2 create-security-group --group-name web --description web")
    start = "ec2 run-instances --image-id ami-1 --instance-type t3.micro --security-groups"
    machine = json.loads(aws(f"{start} web")[1])["Instances"][0]
    assert [group["GroupName"] for group in machine["SecurityGroups"]] == ["web"]
    assert "InvalidGroup.NotFound" in aws(f"{start} nothing")[2]


def test_an_ip_set_is_found_by_name_and_id(aws) -> None:
    """The name was ignored."""
    made = "--scope REGIONAL --ip-address-version IPV4 --addresses 10.0.0.0/8"
    found = json.loads(aws(f"wafv2 create-ip-set --name one {made}")[1])["Summary"]["Id"]
    assert aws(f"wafv2 get-ip-set --name one --scope REGIONAL --id {found}")[0] == 0
    assert (
        "WAFNonexistentItemException"
        in aws(f"wafv2 get-ip-set --name two --scope REGIONAL --id {found}")[2]
    )


_DATABASE = (
    "rds create-db-instance --db-instance-identifier d --db-instance-class db.t3.micro --engine "
    "postgres "
    "--master-username u --master-user-password password1 --allocated-storage 20"
)
_CACHE = (
    "elasticache create-cache-cluster --cache-cluster-id c --engine redis --cache-node-type "
    "cache.t3.micro"
)
_SCALING = (
    "autoscaling create-auto-scaling-group --auto-scaling-group-name g --min-size 0 --max-size 2"
)
_MACHINE = "ec2 run-instances --image-id ami-1 --instance-type t3.micro"
_VPC = "vpc-00000000000000000"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            "cloudtrail create-trail --name trail --s3-bucket-name nothing",
            "S3BucketDoesNotExistException",
        ),
        (
            f"{_SCALING} --availability-zones us-east-1a --launch-configuration-name nothing",
            "ValidationError",
        ),
        (
            f"{_SCALING} --availability-zones us-east-1a --launch-template "
            f"LaunchTemplateName=nothing",
            "ValidationError",
        ),
        (f"{_SCALING} --availability-zones us-east-1a", "ValidationError"),
        (
            "autoscaling put-scaling-policy --auto-scaling-group-name nothing --policy-name p "
            "--scaling-adjustment 1 "
            "--adjustment-type ChangeInCapacity",
            "ValidationError",
        ),
        (
            f"{_CACHE} --num-cache-nodes 1 --cache-parameter-group-name nothing",
            "CacheParameterGroupNotFound",
        ),
        (
            f"{_CACHE} --num-cache-nodes 1 --cache-subnet-group-name nothing",
            "CacheSubnetGroupNotFoundFault",
        ),
        (
            "ecs create-service --cluster nothing --service-name s --task-definition t",
            "ClusterNotFoundException",
        ),
        (
            "ecs create-service --cluster there --service-name s --task-definition nothing",
            "ClientException",
        ),
        (f"{_DATABASE} --db-subnet-group-name nothing", "DBSubnetGroupNotFoundFault"),
        (
            "iam attach-user-policy --user-name u --policy-arn "
            "arn:aws:iam::000000000000:policy/nothing",
            "NoSuchEntity",
        ),
        (f"ec2 create-subnet --vpc-id {_VPC} --cidr-block 10.0.0.0/24", "InvalidVpcID.NotFound"),
        (
            f"ec2 create-security-group --group-name g --description g --vpc-id {_VPC}",
            "InvalidVpcID.NotFound",
        ),
        (f"ec2 create-route-table --vpc-id {_VPC}", "InvalidVpcID.NotFound"),
        (f"{_MACHINE} --subnet-id subnet-00000000000000000", "InvalidSubnetID.NotFound"),
        (f"{_MACHINE} --key-name nothing", "InvalidKeyPair.NotFound"),
        (f"{_MACHINE} --security-group-ids sg-00000000000000000", "InvalidGroup.NotFound"),
        (f"{_MACHINE} --iam-instance-profile Name=nothing", "InvalidParameterValue"),
        (
            f"{_MACHINE} --launch-template LaunchTemplateName=nothing",
            "InvalidLaunchTemplateName.NotFoundException",
        ),
        ("elbv2 create-load-balancer --name b --subnets subnet-0", "SubnetNotFound"),
        (
            f"elbv2 create-target-group --name t --protocol HTTP --port 80 --vpc-id {_VPC}",
            "ValidationError",
        ),
        (
            "lambda create-alias --function-name f --name live --function-version 9",
            "ResourceNotFoundException",
        ),
        (
            "lambda create-event-source-mapping --function-name f "
            "--event-source-arn arn:aws:sqs:us-east-1:000000000000:nothing",
            "InvalidParameterValueException",
        ),
        (
            "athena create-named-query --name n --database d --query-string 'SELECT 1' "
            "--work-group nothing",
            "InvalidRequestException",
        ),
        (
            "firehose create-delivery-stream --delivery-stream-name d "
            "--extended-s3-destination-configuration "
            "RoleARN=arn:aws:iam::000000000000:role/r,BucketARN=arn:aws:s3:::nothing",
            "InvalidArgumentException",
        ),
    ],
)
def test_what_refers_to_nothing_is_refused(aws, line: str, code: str) -> None:
    """It succeeded, without the step that it needs."""
    aws("ecs create-cluster --cluster-name there")
    aws("iam create-user --user-name u")
    image = "ImageUri=000000000000.dkr.ecr.us-east-1.amazonaws.com/f:latest"
    role = "arn:aws:iam::000000000000:role/r"
    aws(
        f"lambda create-function --function-name f --package-type Image --code {image} --role "
        f"{role}"
    )
    exit_code, _, error = aws(line)
    assert exit_code != 0 and f"({code})" in error


def test_a_workflow_ends_with_its_machine(aws) -> None:
    """It went on in the background, and made things when nobody looked any more."""
    machine = "arn:aws:states:us-east-1:000000000000:stateMachine:m"
    call = {
        "Type": "Task",
        "Resource": "arn:aws:states:::aws-sdk:sns:createTopic",
        "Parameters": {"Name": "late"},
    }
    states = {"A": {"Type": "Wait", "Seconds": 1, "Next": "B"}, "B": {**call, "End": True}}
    definition = json.dumps({"StartAt": "A", "States": states})
    role = "arn:aws:iam::000000000000:role/r"
    for deleted in (False, True):
        made = aws(
            f"stepfunctions create-state-machine --name m --role-arn {role} --definition "
            f"'{definition}'"
        )
        assert made[0] == 0, made
        assert aws(f"stepfunctions start-execution --state-machine-arn {machine}")[0] == 0
        time.sleep(0.5)  # it is past its start, at which it looks for its machine
        if deleted:
            assert aws(f"stepfunctions delete-state-machine --state-machine-arn {machine}")[0] == 0
        time.sleep(1.0)
        assert ("late" in aws("sns list-topics")[1]) is not deleted
        aws("sns delete-topic --topic-arn arn:aws:sns:us-east-1:000000000000:late")
        aws(f"stepfunctions delete-state-machine --state-machine-arn {machine}")
