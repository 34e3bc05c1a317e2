"""Makes MiniStack answer as AWS documents it, where this version of the package does not.

Each correction is a function with a link to the page of AWS that it follows and a test in
``tests/aws/simulator/test_corrections.py``, so that it can go when the package does it by itself. All of them are
applied once, in the zygote, to the tables by which MiniStack's modules find the handler of an operation.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
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
        _update_all_of_a_group,
        _keep_groups_in_bounds,
        _spread_groups_over_zones_alike,
        _name_launch_templates_in_full,
        _match_families,
        _forward_to_one_group,
        _know_balancers_of_groups,
        _take_versions_of_templates_back,
        _complete_modified_volumes,
        _change_domains_in_part,
        _make_by_template_as_by_request,
        _know_sets_by_name,
        _end_workflows_with_their_machine,
        _refuse_what_names_nothing,
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


def _end_workflows_with_their_machine() -> None:
    """End the executions of a state machine that is deleted at their next transition: MiniStack forgets them, and they
    go on.

    https://docs.aws.amazon.com/step-functions/latest/apireference/API_DeleteStateMachine.html
    """
    workflows = _module("stepfunctions")
    delete = workflows._delete_state_machine

    def deleted(request: Mapping[str, Any]) -> Answer:
        for execution in [*workflows._executions.values()]:  # executions begin meanwhile in other threads
            if execution["stateMachineArn"] == request.get("stateMachineArn") and execution["status"] == "RUNNING":
                execution["status"] = "ABORTED"
        return delete(request)

    workflows._delete_state_machine = deleted


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
    revoked = groups.revoked(handlers["RevokeSecurityGroupIngress"], "IpPermissions")
    handlers["RevokeSecurityGroupIngress"] = groups.by_name(revoked)
    handlers["RevokeSecurityGroupEgress"] = groups.revoked(handlers["RevokeSecurityGroupEgress"], "IpPermissionsEgress")
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
    _before(autoscaling._ACTION_MAP, "SetDesiredCapacity", _bounds_of_group)


def _bounds_of_group(request: Parameters) -> Answer | None:
    scaling = _module("autoscaling")
    group = scaling._asgs.get(scaling._p(request, "AutoScalingGroupName"))
    asked = scaling._p(request, "DesiredCapacity")
    if group is None or not asked or int(group["MinSize"]) <= int(asked) <= int(group["MaxSize"]):
        return None
    side, bound = ("below min", "MinSize") if int(asked) < int(group["MinSize"]) else ("above max", "MaxSize")
    told = f"New SetDesiredCapacity value {asked} is {side} value {group[bound]} for the AutoScalingGroup."
    return scaling._error("ValidationError", told)


def _update_all_of_a_group() -> None:
    """Update what MiniStack drops from a request about an Auto Scaling group: its zones, what its machines are launched
    from, how they end.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/auto-scaling-benefits.html
    """
    autoscaling = _module("autoscaling")
    update = autoscaling._ACTION_MAP["UpdateAutoScalingGroup"]

    def updated(request: Parameters) -> Answer:
        group = autoscaling._asgs.get(autoscaling._p(request, "AutoScalingGroupName"))
        if group is None:
            return update(request)
        for member in ("AvailabilityZones", "TerminationPolicies"):
            group[member] = autoscaling._parse_member_list(request, member) or group[member]
        zones = sorted(autoscaling._parse_member_list(request, "AvailabilityZones"))
        for place, machine in enumerate(group["Instances"] if zones else ()):  # AWS balances them over the zones anew
            machine["AvailabilityZone"] = zones[place % len(zones)]
        protected = autoscaling._p(request, "NewInstancesProtectedFromScaleIn")
        if protected:
            group["NewInstancesProtectedFromScaleIn"] = protected == "true"
        configuration = autoscaling._p(request, "LaunchConfigurationName")
        if configuration:
            group["LaunchConfigurationName"] = configuration
            group["LaunchTemplate"] = {}
        template = [autoscaling._p(request, f"LaunchTemplate.LaunchTemplate{part}") for part in ("Id", "Name")]
        if any(template):
            version = autoscaling._p(request, "LaunchTemplate.Version") or "$Default"
            named = template[0] or template[1]
            group["LaunchConfigurationName"] = ""
            group["LaunchTemplate"] = {"LaunchTemplateId": named, "LaunchTemplateName": named, "Version": version}
        return update(request)

    autoscaling._ACTION_MAP["UpdateAutoScalingGroup"] = updated


def _name_launch_templates_in_full() -> None:
    """Show the launch template of an Auto Scaling group by id and by name, however the request named it; MiniStack
    shows either as both.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplateSpecification.html
    """
    autoscaling = _module("autoscaling")
    reconcile = autoscaling._reconcile_instances

    def reconciled(group: dict[str, Any]) -> None:
        named = group["LaunchTemplate"].get("LaunchTemplateId")
        for key, template in _module("ec2")._launch_templates.items():
            if named in (key, template["LaunchTemplateName"]):
                full = {"LaunchTemplateId": key, "LaunchTemplateName": template["LaunchTemplateName"]}
                group["LaunchTemplate"] |= full
        reconcile(group)

    autoscaling._reconcile_instances = reconciled


def _spread_groups_over_zones_alike() -> None:
    """Start the machines of an Auto Scaling group in the same zones however the zones are listed: AWS spreads them
    evenly over a set of zones, MiniStack begins with the one that was named first.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/auto-scaling-benefits.html
    """
    autoscaling = _module("autoscaling")
    reconcile = autoscaling._reconcile_instances

    def reconciled(group: Mapping[str, Any]) -> None:
        reconcile({**group, "AvailabilityZones": sorted(group["AvailabilityZones"])})  # its list of machines is kept

    autoscaling._reconcile_instances = reconciled


def _match_families() -> None:
    """Refuse a PostgreSQL instance whose version is of another family than its parameter group.

    https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/parameter-groups-overview.html
    """
    rds = _module("rds")
    create = rds._ACTION_MAP["CreateDBInstance"]

    def created(request: Parameters) -> Answer:
        name = rds._p(request, "DBParameterGroupName")
        engine = rds._p(request, "Engine")
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


def _know_balancers_of_groups() -> None:
    """Say of a target group which load balancers use it, as the listeners are now, and end listeners with their load
    balancer: MiniStack keeps both, whatever becomes of what they say.

    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_TargetGroup.html
    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_DeleteLoadBalancer.html
    """
    alb = _module("alb")

    def followed(handler: Handler) -> Handler:
        def handle(request: Parameters) -> Answer:
            answer = handler(request)
            for arn in [arn for arn, held in alb._listeners.items() if held["LoadBalancerArn"] not in alb._lbs]:
                alb._delete_listener({"ListenerArn": [arn]})
            users: dict[str, list[str]] = {}
            for rule in alb._rules.values():
                listener = alb._listeners.get(rule["ListenerArn"])
                for action in rule["Actions"] if listener else ():
                    known = users.setdefault(action.get("TargetGroupArn", ""), [])
                    if listener["LoadBalancerArn"] not in known:
                        known.append(listener["LoadBalancerArn"])
            for arn, group in alb._tgs.items():
                group["LoadBalancerArns"] = users.get(arn, [])
            return answer

        return handle

    for operation in ("CreateListener", "ModifyListener", "DeleteListener", "DeleteLoadBalancer"):
        alb._ACTION_MAP[operation] = followed(alb._ACTION_MAP[operation])


def _take_versions_of_templates_back() -> None:
    """Delete versions of a launch template, which MiniStack can only add, and know the source of a new one by
    ``$Latest`` and ``$Default``. The number of the last version is given again once that is deleted.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteLaunchTemplateVersions.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplateVersion.html
    """
    ec2 = _module("ec2")
    create = ec2._ACTION_MAP["CreateLaunchTemplateVersion"]

    def created(request: Parameters) -> Answer:
        template = _template_named_by(request)
        source = ec2._p(request, "SourceVersion")
        if template is None or not source:
            return create(request)
        number = _version_number(template, source)
        if number not in {str(version["VersionNumber"]) for version in template["Versions"]}:
            message = f"Could not find launch template version {source} for the specified launch template."
            return ec2._error("InvalidLaunchTemplateId.VersionNotFound", ec2._esc(message), 400)
        return create({**request, "SourceVersion": [number]})

    def deleted(request: Parameters) -> Answer:
        template = _template_named_by(request)
        if template is None:
            message = "At least one of the launch templates specified in the request does not exist."
            return ec2._error("InvalidLaunchTemplateId.NotFound", message, 400)
        gone = refused = ""
        for asked in ec2._parse_member_list(request, "LaunchTemplateVersion"):
            number = _version_number(template, asked)
            left = [version for version in template["Versions"] if str(version["VersionNumber"]) != number]
            item = f"<launchTemplateId>{template['LaunchTemplateId']}</launchTemplateId>"
            item += f"<launchTemplateName>{ec2._esc(template['LaunchTemplateName'])}</launchTemplateName>"
            item += f"<versionNumber>{ec2._esc(number)}</versionNumber>"
            if len(left) == len(template["Versions"]):
                code = "launchTemplateVersionDoesNotExist"
                refused += f"<item>{item}<responseError><code>{code}</code></responseError></item>"
            elif number == str(template["DefaultVersionNumber"]):
                message = "The default version of a launch template cannot be deleted."
                error = f"<code>unexpectedError</code><message>{message}</message>"
                refused += f"<item>{item}<responseError>{error}</responseError></item>"
            else:
                template["Versions"] = left
                template["LatestVersionNumber"] = max(version["VersionNumber"] for version in left)
                gone += f"<item>{item}</item>"
        return ec2._xml(
            200,
            "DeleteLaunchTemplateVersionsResponse",
            f"<successfullyDeletedLaunchTemplateVersionSet>{gone}</successfullyDeletedLaunchTemplateVersionSet>"
            f"<unsuccessfullyDeletedLaunchTemplateVersionSet>{refused}</unsuccessfullyDeletedLaunchTemplateVersionSet>",
        )

    ec2._ACTION_MAP |= {"CreateLaunchTemplateVersion": created, "DeleteLaunchTemplateVersions": deleted}


def _template_named_by(request: Parameters) -> dict[str, Any] | None:
    ec2 = _module("ec2")
    named = ec2._p(request, "LaunchTemplateId") or ec2._p(request, "LaunchTemplateName")
    templates = ec2._launch_templates.items()
    return next((held for key, held in templates if named in (key, held["LaunchTemplateName"])), None)


def _version_number(template: Mapping[str, Any], version: str) -> str:
    words = {"$Latest": "LatestVersionNumber", "$Default": "DefaultVersionNumber"}
    return str(template[words[version]]) if version in words else version


def _complete_modified_volumes() -> None:
    """Give a volume of another type what a new one of that type has, and the throughput that was asked for: MiniStack
    leaves both as they were.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyVolume.html
    """
    ec2 = _module("ec2")
    modify = ec2._ACTION_MAP["ModifyVolume"]

    def modified(request: Parameters) -> Answer:
        volume = ec2._volumes.get(ec2._p(request, "VolumeId"))
        kind = ec2._p(request, "VolumeType")
        throughput = ec2._p(request, "Throughput")
        if volume is not None and kind and kind != volume["VolumeType"]:
            volume["Iops"] = 3000 if kind in ("gp3", "io1", "io2") else 0
            volume["Throughput"] = 125 if kind == "gp3" else 0
        if volume is not None and throughput:
            volume["Throughput"] = int(throughput)
        return modify(request)

    ec2._ACTION_MAP["ModifyVolume"] = modified


def _change_domains_in_part() -> None:
    """Leave what a change of a domain does not name as it is: MiniStack puts its options in the place of all of a kind.

    https://docs.aws.amazon.com/opensearch-service/latest/APIReference/API_UpdateDomainConfig.html
    """
    opensearch = _module("opensearch")
    update = opensearch._update_domain_config

    def updated(name: str, request: Mapping[str, Any]) -> Answer:
        held = opensearch._domains.get(name, {})
        return update(name, {member: _laid_over(held.get(member), value) for member, value in request.items()})

    opensearch._update_domain_config = updated


def _laid_over(held: Any, value: Any) -> Any:
    """Return ``value`` with the members that it lacks and ``held`` has; of what is no structure ``value`` itself."""
    if not isinstance(held, dict) or not isinstance(value, dict):
        return value
    return {**held, **{name: _laid_over(held.get(name), item) for name, item in value.items()}}


def _make_by_template_as_by_request() -> None:
    """Make topics, subscriptions and tables of a stack as the services make them: MiniStack gives a topic another
    policy and a display name, leaves out attributes of a subscription, and provisions a table that is billed by
    request.

    https://docs.aws.amazon.com/sns/latest/dg/sns-access-policy-use-cases.html
    https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-sns-topic.html
    https://docs.aws.amazon.com/amazondynamodb/latest/APIReference/API_ProvisionedThroughputDescription.html
    """
    made = importlib.import_module("ministack.services.cloudformation.provisioners")
    sns = _module("sns")
    dynamodb = _module("dynamodb")

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
            group_id = self.ec2._p(request, "GroupId")
            name = self.ec2._p(request, "GroupName")
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
            ec2 = self.ec2
            group_id = ec2._p(request, "GroupId")
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
        ec2 = self.ec2
        is_egress = kept_in == "IpPermissionsEgress"
        left = []
        items = ""
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


Check = Callable[..., Answer | None]
"""Takes what the handler takes and returns the error, None for a request that may be handled."""


def _before(handlers: dict[str, Any], operation: str, check: Check) -> None:
    original = handlers[operation]
    handlers[operation] = lambda *request: check(*request) or original(*request)


def _refuse_what_names_nothing() -> None:
    """Refuse a request that refers to what is not there, where the texts of tasks rest on it: MiniStack makes the rest
    without it. What a role, an image or a target must be is not checked; environment.md lists it.

    https://docs.aws.amazon.com/awscloudtrail/latest/APIReference/API_CreateTrail.html
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_CreateAutoScalingGroup.html
    https://docs.aws.amazon.com/AmazonElastiCache/latest/APIReference/API_CreateCacheCluster.html
    https://docs.aws.amazon.com/AmazonECS/latest/APIReference/API_CreateService.html
    https://docs.aws.amazon.com/AmazonRDS/latest/APIReference/API_CreateDBInstance.html
    https://docs.aws.amazon.com/IAM/latest/APIReference/API_AttachRolePolicy.html
    https://docs.aws.amazon.com/IAM/latest/APIReference/API_PutRolePermissionsBoundary.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_CreateTargetGroup.html
    https://docs.aws.amazon.com/lambda/latest/api/API_CreateAlias.html
    https://docs.aws.amazon.com/lambda/latest/api/API_UpdateAlias.html
    https://docs.aws.amazon.com/athena/latest/APIReference/API_CreateNamedQuery.html
    https://docs.aws.amazon.com/firehose/latest/APIReference/API_CreateDeliveryStream.html
    """
    trails = _module("cloudtrail")
    for operation in ("CreateTrail", "UpdateTrail"):
        _before(trails._DISPATCH, operation, _bucket_of_trail)
    scaling = _module("autoscaling")
    _before(scaling._ACTION_MAP, "CreateAutoScalingGroup", _source_of_machines)
    _before(scaling._ACTION_MAP, "UpdateAutoScalingGroup", _source_of_machines)
    _before(scaling._ACTION_MAP, "PutScalingPolicy", _group_of_policy)
    _before(vars(_module("elasticache")), "_create_cache_cluster", _groups_of_cache)
    _before(vars(_module("elasticache")), "_modify_cache_cluster", _groups_of_cache)
    _before(_module("ecs")._ACTION_MAP, "CreateService", _parts_of_service)
    _before(_module("rds")._ACTION_MAP, "CreateDBInstance", _subnets_of_database)
    for principal in ("Role", "User", "Group"):
        _before(_module("iam")._IAM_HANDLERS, f"Attach{principal}Policy", _attached_policy)
    for principal in ("Role", "User"):
        _before(_module("iam")._IAM_HANDLERS, f"Put{principal}PermissionsBoundary", _policy_of_boundary)
    machines = _module("ec2")._ACTION_MAP
    for operation in ("CreateSubnet", "CreateSecurityGroup", "CreateRouteTable", "AttachInternetGateway"):
        _before(machines, operation, _network_of)
    _before(machines, "RunInstances", _parts_of_machine)
    balancers = _module("alb")._ACTION_MAP
    _before(balancers, "CreateLoadBalancer", _subnets_of_balancer)
    _before(balancers, "SetSubnets", _subnets_of_balancer)
    _before(balancers, "CreateTargetGroup", _network_of_targets)
    _before(vars(_module("lambda_svc")), "_create_alias", _version_of_alias)
    _before(vars(_module("lambda_svc")), "_update_alias", _version_of_updated_alias)
    _before(vars(_module("lambda_svc")), "_create_esm", _queue_of_mapping)
    _before(vars(_module("athena")), "_create_named_query", _work_group_of_query)
    for operation in ("CreateDeliveryStream", "UpdateDestination"):
        _before(_module("firehose")._HANDLERS, operation, _bucket_of_delivery)


def _json_error(code: str, message: str, status: int = 400) -> Answer:
    return importlib.import_module("ministack.core.responses").error_response_json(code, message, status)


def _bucket_of_trail(request: Mapping[str, Any]) -> Answer | None:
    bucket = request.get("S3BucketName")
    if not bucket or bucket in _module("s3")._buckets:
        return None
    return _module("cloudtrail")._err("S3BucketDoesNotExistException", f"S3 bucket {bucket} does not exist!")


def _bucket_of_delivery(request: Mapping[str, Any]) -> Answer | None:
    buckets = _module("s3")._buckets
    members = (f"{kind}S3Destination{what}" for kind in ("Extended", "") for what in ("Configuration", "Update"))
    for member in members:
        arn = (request.get(member) or {}).get("BucketARN", "")
        if arn and arn.removeprefix("arn:aws:s3:::") not in buckets:
            return _json_error("InvalidArgumentException", f"The bucket {arn} does not exist.", 400)
    return None


def _source_of_machines(request: Parameters) -> Answer | None:
    scaling = _module("autoscaling")
    templates = _module("ec2")._launch_templates
    configuration = scaling._p(request, "LaunchConfigurationName")
    if configuration and configuration not in scaling._launch_configs:
        told = f"A launch configuration with the name: {configuration} does not exist"
        return scaling._error("ValidationError", f"Launch configuration name not found - {told}")
    stems = ("LaunchTemplate", "MixedInstancesPolicy.LaunchTemplate.LaunchTemplateSpecification")
    sources = [scaling._p(request, f"{stem}.LaunchTemplate{part}") for stem in stems for part in ("Name", "Id")]
    known = {text for key, template in templates.items() for text in (key, template["LaunchTemplateName"])}
    unknown = [text for text in sources if text and text not in known]
    if unknown:
        told = f"The specified launch template, {unknown[0]}, does not exist."
        return scaling._error("ValidationError", f"You must use a valid fully-formed launch template. {told}")
    creates = scaling._p(request, "Action") == "CreateAutoScalingGroup"
    if creates and not (configuration or any(sources) or scaling._p(request, "InstanceId")):
        told = "either LaunchTemplate, LaunchConfigurationName, InstanceId or MixedInstancesPolicy parameter."
        return scaling._error("ValidationError", f"Valid requests must contain {told}")
    return None


def _group_of_policy(request: Parameters) -> Answer | None:
    scaling = _module("autoscaling")
    name = scaling._p(request, "AutoScalingGroupName")
    return None if name in scaling._asgs else scaling._error("ValidationError", f"Group {name} not found")


def _groups_of_cache(request: Parameters) -> Answer | None:
    caches = _module("elasticache")
    parameters = caches._p(request, "CacheParameterGroupName")
    subnets = caches._p(request, "CacheSubnetGroupName")
    if parameters and parameters not in caches._param_groups:
        return caches._error("CacheParameterGroupNotFound", f"CacheParameterGroup {parameters} not found.", 404)
    if subnets and subnets not in caches._subnet_groups and subnets != "default":
        return caches._error("CacheSubnetGroupNotFoundFault", f"Cache Subnet Group {subnets} does not exist.", 400)
    return None


def _parts_of_service(request: Mapping[str, Any]) -> Answer | None:
    services = _module("ecs")
    if services._resolve_cluster_name(request.get("cluster", "default")) not in services._clusters:
        return _json_error("ClusterNotFoundException", "Cluster not found.", 400)
    definition = request.get("taskDefinition", "")
    if definition and services._resolve_td_key(definition) not in services._task_defs:
        return _json_error("ClientException", "TaskDefinition not found.", 400)
    return None


def _subnets_of_database(request: Parameters) -> Answer | None:
    databases = _module("rds")
    name = databases._p(request, "DBSubnetGroupName")
    if not name or name in databases._subnet_groups or name == "default":
        return None
    return databases._error("DBSubnetGroupNotFoundFault", f"DB subnet group '{name}' does not exist.", 404)


def _attached_policy(request: Parameters) -> Answer | None:
    iam = _module("iam")
    arn = iam._p(request, "PolicyArn")
    if iam._is_aws_managed_arn(arn) or arn in iam._policies:
        return None
    return iam._error(404, "NoSuchEntity", f"Policy {arn} does not exist or is not attachable.", ns="iam")


def _policy_of_boundary(request: Parameters) -> Answer | None:
    iam = _module("iam")
    arn = iam._p(request, "PermissionsBoundary")
    if iam._is_aws_managed_arn(arn) or arn in iam._policies:
        return None
    return iam._error(404, "NoSuchEntity", f"Scope ARN: {arn} does not exist or is not attachable.", ns="iam")


def _absent(name: str, store: Container[str], code: str, message: str) -> Answer | None:
    """Return the error of EC2 for what ``store`` does not have; None for what it has, and for no name."""
    ec2 = _module("ec2")
    return None if not name or name in store else ec2._error(code, ec2._esc(message.format(name)), 400)


def _network_of(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    vpc = ec2._p(request, "VpcId")
    return _absent(vpc, ec2._vpcs, "InvalidVpcID.NotFound", "The vpc ID '{}' does not exist")


def _parts_of_machine(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    subnet = ec2._p(request, "SubnetId")
    key = ec2._p(request, "KeyName")
    found = _absent(subnet, ec2._subnets, "InvalidSubnetID.NotFound", "The subnet ID '{}' does not exist")
    found = found or _absent(key, ec2._key_pairs, "InvalidKeyPair.NotFound", "The key pair '{}' does not exist")
    for group in ec2._parse_member_list(request, "SecurityGroupId"):
        message = "The security group '{}' does not exist"
        found = found or _absent(group, ec2._security_groups, "InvalidGroup.NotFound", message)
    return found or _profile_of_machine(request) or _template_of_machine(request)


def _profile_of_machine(request: Parameters) -> Answer | None:
    name = _module("ec2")._p(request, "IamInstanceProfile.Name")
    message = "Value ({}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
    return _absent(name, _module("iam")._instance_profiles, "InvalidParameterValue", message)


def _template_of_machine(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    message = "At least one of the launch templates specified in the request does not exist."
    name = ec2._p(request, "LaunchTemplate.LaunchTemplateName")
    names = {template["LaunchTemplateName"] for template in ec2._launch_templates.values()}
    template_id = ec2._p(request, "LaunchTemplate.LaunchTemplateId")
    unnamed = _absent(name, names, "InvalidLaunchTemplateName.NotFoundException", message)
    return unnamed or _absent(template_id, ec2._launch_templates, "InvalidLaunchTemplateId.NotFound", message)


def _subnets_of_balancer(request: Parameters) -> Answer | None:
    balancers = _module("alb")
    subnets = _module("ec2")._subnets
    for key, values in request.items():
        if key.startswith("Subnets.member.") and values[0] not in subnets:
            return balancers._error("SubnetNotFound", f"The subnet ID '{values[0]}' does not exist")
    return None


def _network_of_targets(request: Parameters) -> Answer | None:
    balancers = _module("alb")
    vpc = balancers._p(request, "VpcId")
    if not vpc or vpc in _module("ec2")._vpcs:
        return None
    return balancers._error("ValidationError", f"The VPC ID '{vpc}' is not found")


def _version_of_alias(function: str, request: Mapping[str, Any]) -> Answer | None:
    functions = _module("lambda_svc")
    held = functions._functions.get(function)
    version = str(request.get("FunctionVersion", ""))
    if held is None or version == "$LATEST" or version in held["versions"]:
        return None
    told = f"Function not found: {functions._func_arn(function)}:{version}"
    return _json_error("ResourceNotFoundException", told, 404)


def _version_of_updated_alias(function: str, _: str, request: Mapping[str, Any]) -> Answer | None:
    return _version_of_alias(function, request) if "FunctionVersion" in request else None


def _queue_of_mapping(request: Mapping[str, Any]) -> Answer | None:
    source = request.get("EventSourceArn", "")
    if not source.startswith("arn:aws:sqs:") or _module("sqs")._queue_by_arn(source) is not None:
        return None
    told = "AWS.SimpleQueueService.NonExistentQueue. SQS Error Message: The specified queue does not exist."
    message = f"Error occurred while ReceiveMessage. SQS Error Code: {told}"
    return _json_error("InvalidParameterValueException", message, 400)


def _work_group_of_query(request: Mapping[str, Any]) -> Answer | None:
    athena = _module("athena")
    name = request.get("WorkGroup") or "primary"
    if name in athena._workgroups:
        return None
    return _json_error("InvalidRequestException", f"WorkGroup {name} is not found.", 400)


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
    gone = {**rule}
    kept = {**rule}
    found = iter(parts)
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
