"""Makes MiniStack answer as AWS documents it, where this version of the package does not.

Each correction is a function with a link to the page of AWS that it follows and a test in
``tests/aws/simulator/test_corrections.py``, so that it can go when the package does it by itself. All of them are
applied once, in the zygote, to the tables by which MiniStack's modules find the handler of an operation.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LONGEST_POLL_S = 1.0
"""Seconds that a poll of an empty queue may take: a session's clock is not spent on messages that nobody can send."""
_MOST_POLL_S = 20

Answer = tuple[int, Mapping[str, str], bytes]
"""What a handler returns: status, headers and body."""


def install() -> None:
    """Apply all corrections. Raises RuntimeError when this version of MiniStack lacks what is corrected."""
    for correct in (
        _keep_dns_names_in_lower_case,
        _answer_polls_in_time,
        _know_groups_by_name,
        _keep_groups_in_bounds,
        _match_families,
        _forward_to_one_group,
        _make_by_template_as_by_request,
        _know_sets_by_name,
    ):
        try:
            correct()
        except (AttributeError, KeyError) as error:
            raise RuntimeError(f"this version of ministack has no {error}: {correct.__name__} does not fit") from error


def _module(name: str) -> Any:
    return importlib.import_module(f"ministack.services.{name}")


def _keep_dns_names_in_lower_case() -> None:
    """Keep names of DNS as AWS does, however they are spelt: MiniStack keeps a record for each spelling.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/DomainNameFormat.html
    """
    route53 = _module("route53")
    original = route53._normalise_name
    route53._normalise_name = lambda name: name and original(name).lower()


def _answer_polls_in_time() -> None:
    """Answer a poll of an empty queue after ``LONGEST_POLL_S``, and refuse a wait that AWS refuses: MiniStack waits for
    as long as was asked, past the deadline of the client.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_ReceiveMessage.html
    """
    sqs = _module("sqs")
    receive = sqs._HANDLERS["ReceiveMessage"]

    async def received(request: Mapping[str, Any], url: str) -> dict[str, Any]:
        queue = sqs._get_q(request.get("QueueUrl", url), "sqs:ReceiveMessage")
        asked = request.get("WaitTimeSeconds")
        wait_s = int(queue["attributes"].get("ReceiveMessageWaitTimeSeconds", "0") if asked is None else asked)
        if not 0 <= wait_s <= _MOST_POLL_S:
            bounds = f"Must be >= 0 and <= {_MOST_POLL_S}, if provided."
            message = f"Value {wait_s} for parameter WaitTimeSeconds is invalid. Reason: {bounds}"
            raise sqs._Err("InvalidParameterValue", message)
        return await receive({**request, "WaitTimeSeconds": min(wait_s, LONGEST_POLL_S)}, url)

    sqs._HANDLERS["ReceiveMessage"] = received


def _know_sets_by_name() -> None:
    """Find an IP set by its name and its id together, as WAF does: MiniStack ignores the name.

    https://docs.aws.amazon.com/waf/latest/APIReference/API_GetIPSet.html
    """
    waf = _module("waf")
    original = waf._get_ip_set

    def found(request: Mapping[str, Any]) -> Answer:
        held = waf._ip_sets.get(request.get("Id", ""))
        where = "global" if request.get("Scope") == "CLOUDFRONT" else "regional"
        if held is not None and not (held["Name"] == request.get("Name") and f":{where}/" in held["ARN"]):
            message = "AWS WAF couldn\u2019t perform the operation because your resource doesn\u2019t exist."
            return waf._waf_err("WAFNonexistentItemException", message)
        return original(request)

    waf._get_ip_set = found


def _know_groups_by_name() -> None:
    """Find security groups of the default VPC by their names, and revoke as AWS does: MiniStack ignores names, deletes
    nothing by them, and finds a rule only where all its ranges were named.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSecurityGroups.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteSecurityGroup.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RevokeSecurityGroupIngress.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
    """
    groups = _SecurityGroups(_module("ec2"))
    handlers = groups.ec2._ACTION_MAP
    handlers["DescribeSecurityGroups"] = groups.described(handlers["DescribeSecurityGroups"])
    for action in ("DeleteSecurityGroup", "AuthorizeSecurityGroupIngress"):
        handlers[action] = groups.by_name(handlers[action])
    revoke_in, revoke_out = handlers["RevokeSecurityGroupIngress"], handlers["RevokeSecurityGroupEgress"]
    handlers["RevokeSecurityGroupIngress"] = groups.by_name(groups.revoked(revoke_in, "IpPermissions"))
    handlers["RevokeSecurityGroupEgress"] = groups.revoked(revoke_out, "IpPermissionsEgress")
    handlers["RunInstances"] = groups.launched(handlers["RunInstances"])


def _keep_groups_in_bounds() -> None:
    """Keep the desired capacity of an Auto Scaling group within its bounds when these are updated: MiniStack takes any,
    and leaves it below a new minimum.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    """
    autoscaling = _module("autoscaling")
    update = autoscaling._ACTION_MAP["UpdateAutoScalingGroup"]

    def updated(request: Parameters) -> Answer:
        group = autoscaling._asgs.get(autoscaling._p(request, "AutoScalingGroupName"))
        if group is None:
            return update(request)
        sizes = ("MinSize", "DesiredCapacity", "MaxSize")
        low, desired, high = (int(autoscaling._p(request, name) or group[name]) for name in sizes)
        if not autoscaling._p(request, "DesiredCapacity"):
            desired = min(max(low, desired), high)
        if not low <= desired <= high:
            bounds = f"the specified min size:{low} and max size:{high}"
            return autoscaling._error("ValidationError", f"Desired capacity:{desired} must be between {bounds}")
        return update({**request, "DesiredCapacity": [str(desired)]})

    autoscaling._ACTION_MAP["UpdateAutoScalingGroup"] = updated


def _match_families() -> None:
    """Refuse a PostgreSQL instance whose version is of another family than its parameter group.

    https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/parameter-groups-overview.html
    """
    rds = _module("rds")
    create = rds._ACTION_MAP["CreateDBInstance"]

    def created(request: Parameters) -> Answer:
        name, engine = rds._p(request, "DBParameterGroupName"), rds._p(request, "Engine")
        group = rds._param_groups.get(name)
        version = rds._p(request, "EngineVersion") or rds._default_engine_version(engine)
        family = f"postgres{version.partition('.')[0]}"
        if engine != "postgres" or group is None or group["DBParameterGroupFamily"] == family:
            return create(request)
        named = f"{name} with DBParameterGroupFamily {group['DBParameterGroupFamily']}"
        message = f"The parameter group {named} can't be used for this instance. Use a parameter group of {family}."
        return rds._error("InvalidParameterCombination", message, 400)

    rds._ACTION_MAP["CreateDBInstance"] = created


def _forward_to_one_group() -> None:
    """Take an action that forwards to a single target group in either of its forms: MiniStack drops the longer one.

    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_Action.html
    """
    alb = _module("alb")
    parse = alb._parse_actions

    def parsed(request: Parameters, prefix: str = "DefaultActions") -> list[dict[str, Any]]:
        actions = parse(request, prefix)
        for place, action in enumerate(actions, 1):
            forward = f"{prefix}.member.{place}.ForwardConfig"
            group, other = (alb._p(request, f"{forward}.TargetGroups.member.{n}.TargetGroupArn") for n in (1, 2))
            weight = alb._p(request, f"{forward}.TargetGroups.member.1.Weight")
            sticky = alb._p(request, f"{forward}.TargetGroupStickinessConfig.Enabled")
            if group and not other and weight != "0" and sticky != "true":
                action.setdefault("TargetGroupArn", group)
        return actions

    alb._parse_actions = parsed


def _make_by_template_as_by_request() -> None:
    """Make topics, subscriptions and tables of a stack as the services make them: MiniStack gives a topic another
    policy and a display name, leaves out attributes of a subscription, and provisions a table that is billed by
    request.

    https://docs.aws.amazon.com/sns/latest/dg/sns-access-policy-use-cases.html
    https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-sns-topic.html
    https://docs.aws.amazon.com/amazondynamodb/latest/APIReference/API_ProvisionedThroughputDescription.html
    """
    made = importlib.import_module("ministack.services.cloudformation.provisioners")
    sns, dynamodb = _module("sns"), _module("dynamodb")

    def topic(arn: str, properties: Mapping[str, Any]) -> None:
        attributes = sns._topics[arn]["attributes"]
        policy = json.loads(attributes["Policy"])
        policy["Statement"][0]["Condition"] = {"StringEquals": {"AWS:SourceOwner": attributes["Owner"]}}
        attributes |= {"Policy": json.dumps(policy), "DisplayName": properties.get("DisplayName", "")}
        for subscription in sns._topics[arn]["subscriptions"]:
            complete(subscription)

    def complete(subscription: dict[str, Any]) -> None:
        pending = "false" if subscription["confirmed"] else "true"
        usual = {
            "SubscriptionArn": subscription["arn"],
            "TopicArn": subscription["topic_arn"],
            "Protocol": subscription["protocol"],
            "Endpoint": subscription["endpoint"],
            "Owner": subscription["owner"],
            "ConfirmationWasAuthenticated": "false" if pending == "true" else "true",
            "PendingConfirmation": pending,
            "RawMessageDelivery": "false",
        }
        subscription["attributes"] = usual | subscription["attributes"]

    def subscribed(arn: str, properties: Mapping[str, Any]) -> None:
        subscription = sns._find_subscription(sns._sub_arn_to_topic[arn], arn)
        complete(subscription)
        if "FilterPolicyScope" not in properties:
            subscription["attributes"].pop("FilterPolicyScope", None)

    def table(name: str, _: Mapping[str, Any]) -> None:
        held = dynamodb._tables[name]
        if held["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST":
            held["ProvisionedThroughput"] = {"ReadCapacityUnits": 0, "WriteCapacityUnits": 0}

    handlers = made._RESOURCE_HANDLERS
    followed = {"AWS::SNS::Topic": topic, "AWS::SNS::Subscription": subscribed, "AWS::DynamoDB::Table": table}
    for kind, follow in followed.items():
        handlers[kind]["create"] = _followed(handlers[kind]["create"], follow)


def _followed(create: Callable[..., Any], follow: Callable[[str, Mapping[str, Any]], None]) -> Callable[..., Any]:
    def creates(logical_id: str, properties: Mapping[str, Any], stack: str) -> Any:
        answer = create(logical_id, properties, stack)
        follow(answer[0], properties)
        return answer

    return creates


Parameters = dict[str, Any]
"""A request of the query protocol: for each name the list of its values."""
Handler = Callable[[Parameters], Answer]
_SOURCES = {
    "IpRanges": "CidrIp",
    "Ipv6Ranges": "CidrIpv6",
    "PrefixListIds": "PrefixListId",
    "UserIdGroupPairs": "GroupId",
}
"""For each kind of source of a rule, the member that identifies one."""
_PROTOCOLS = {"1": "icmp", "6": "tcp", "17": "udp", "58": "icmpv6"}


class _NoSuchGroup(Exception):
    """A request named a group that the default VPC does not have; the message is AWS's."""


class _SecurityGroups:
    """Corrects the handlers of security groups in MiniStack's module ``ec2``."""

    def __init__(self, ec2: Any) -> None:
        self.ec2 = ec2

    def _id_of(self, name: str) -> str:
        vpc = self.ec2._DEFAULT_VPC_ID
        for group_id, group in self.ec2._security_groups.items():
            if group["GroupName"] == name and group["VpcId"] == vpc:
                return group_id
        raise _NoSuchGroup(f"The security group '{name}' does not exist in default VPC '{vpc}'")

    def _refused(self, code: str, message: str) -> Answer:
        return self.ec2._error(code, self.ec2._esc(message), 400)

    def described(self, handler: Handler) -> Handler:
        """Return the handler, with names in the place of ids as well."""

        def describe(request: Parameters) -> Answer:
            names = self.ec2._parse_member_list(request, "GroupName")
            ids = self.ec2._parse_member_list(request, "GroupId")
            try:
                ids += [self._id_of(name) for name in names]
            except _NoSuchGroup as error:
                return self._refused("InvalidGroup.NotFound", str(error))
            return handler({**request, **{f"GroupId.{place}": [found] for place, found in enumerate(ids, 1)}})

        return describe

    def launched(self, handler: Handler) -> Handler:
        """Return the handler that starts machines, with names of their groups in the place of ids."""

        def launch(request: Parameters) -> Answer:
            names = self.ec2._parse_member_list(request, "SecurityGroup")
            try:
                ids = [self._id_of(name) for name in names]
            except _NoSuchGroup as error:
                return self._refused("InvalidGroup.NotFound", str(error))
            return handler({**request, **{f"SecurityGroupId.{place}": [found] for place, found in enumerate(ids, 1)}})

        return launch

    def by_name(self, handler: Handler) -> Handler:
        """Return the handler of an operation on one group, which may be named; sources of rules as well."""

        def handle(request: Parameters) -> Answer:
            group_id, name = self.ec2._p(request, "GroupId"), self.ec2._p(request, "GroupName")
            if not group_id and not name:
                return self._refused("MissingParameter", "The request must contain the parameter groupName or groupId")
            try:
                return handler({**self._with_ids(request), "GroupId": [group_id or self._id_of(name)]})
            except _NoSuchGroup as error:
                return self._refused("InvalidGroup.NotFound", str(error))

        return handle

    def _with_ids(self, request: Parameters) -> Parameters:
        """Return the request with ids for names of groups that are a rule's source."""
        found = dict(request)
        for key, values in request.items():
            stem, _, last = key.rpartition(".")
            if key == "SourceSecurityGroupName":
                found["SourceSecurityGroupId"] = [self._id_of(values[0])]
            elif last == "GroupName" and ".Groups." in key:
                found.setdefault(f"{stem}.GroupId", [self._id_of(values[0])])
            else:
                continue
            del found[key]
        return found

    def revoked(self, handler: Handler, kept_in: str) -> Handler:
        """Return the handler, which takes single ranges out of rules. What is not there is an error, and nothing is
        revoked; in the default VPC it is listed and no error, as AWS documents it."""

        def revoke(request: Parameters) -> Answer:
            ec2, group_id = self.ec2, self.ec2._p(request, "GroupId")
            group = ec2._security_groups.get(group_id)
            if group is None or ec2._parse_member_list(request, "SecurityGroupRuleId"):
                return handler(request)
            asked = [part for rule in ec2._parse_ip_permissions(request, "IpPermissions") for part in _parts(rule)]
            if not asked:
                return self._refused("MissingParameter", "The request must contain the parameter ipPermissions")
            there = {part for rule in group[kept_in] for part in _parts(rule)}
            unknown = [part for part in asked if part not in there]
            if unknown and group["VpcId"] != ec2._DEFAULT_VPC_ID:
                return self._refused(
                    "InvalidPermission.NotFound", "The specified rule does not exist in this security group."
                )
            return self._take_out(group, kept_in, set(asked), unknown)

        return revoke

    def _take_out(self, group: dict[str, Any], kept_in: str, asked: set[Part], unknown: list[Part]) -> Answer:
        ec2, is_egress = self.ec2, kept_in == "IpPermissionsEgress"
        left, items = [], ""
        for rule in group[kept_in]:
            gone, kept = _divided(rule, asked)
            rule_id = ec2._sg_rule_id(group["GroupId"], is_egress, rule)
            if gone is not None:
                items += ec2._revoked_sg_rule_xml(group["GroupId"], {**gone, "SecurityGroupRuleId": rule_id}, is_egress)
            if kept is not None:
                left.append(kept)
            else:
                ec2._tags.pop(rule_id, None)
        group[kept_in] = left
        not_there = "".join(map(_permission_xml, unknown))
        name = f"RevokeSecurityGroup{'Egress' if is_egress else 'Ingress'}Response"
        return ec2._xml(
            200,
            name,
            f"<return>true</return><unknownIpPermissionSet>{not_there}</unknownIpPermissionSet>"
            f"<revokedSecurityGroupRuleSet>{items}</revokedSecurityGroupRuleSet>",
        )


Part = tuple[str, Any, Any, str, str]
"""One rule as AWS counts them: protocol, first and last port, kind of source, source."""


def _parts(rule: Mapping[str, Any]) -> Iterator[Part]:
    protocol = str(rule.get("IpProtocol", "-1")).lower()
    head = (_PROTOCOLS.get(protocol, protocol), rule.get("FromPort"), rule.get("ToPort"))
    for kind, member in _SOURCES.items():
        for source in rule.get(kind, ()):
            yield (*head, kind, source.get(member, "") if isinstance(source, dict) else str(source))


def _divided(rule: dict[str, Any], asked: set[Part]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return what of a rule was asked for, and the rest; None for nothing."""
    parts = list(_parts(rule))
    if not asked.intersection(parts):
        return None, rule
    gone, kept, found = {**rule}, {**rule}, iter(parts)
    for kind in _SOURCES:
        sources = [(source, next(found) in asked) for source in rule.get(kind, ())]
        gone[kind] = [source for source, taken in sources if taken]
        kept[kind] = [source for source, taken in sources if not taken]
    return gone, kept if any(kept[kind] for kind in _SOURCES) else None


def _permission_xml(part: Part) -> str:
    protocol, first, last, kind, source = part
    ports = "" if first is None else f"<fromPort>{first}</fromPort><toPort>{last}</toPort>"
    name, member = {
        "IpRanges": ("ipRanges", "cidrIp"),
        "Ipv6Ranges": ("ipv6Ranges", "cidrIpv6"),
        "PrefixListIds": ("prefixListIds", "prefixListId"),
        "UserIdGroupPairs": ("groups", "groupId"),
    }[kind]
    inner = f"<{name}><item><{member}>{source}</{member}></item></{name}>"
    return f"<item><ipProtocol>{protocol}</ipProtocol>{ports}{inner}</item>"
