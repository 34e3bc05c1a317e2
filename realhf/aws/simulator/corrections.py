"""Corrections of MiniStack, for answers that differ from the AWS documentation in this version of
the package.

Each correction is a function with a link to the AWS page that it follows, and has a test in
``tests/aws/simulator/test_corrections.py``. It can be removed once the package itself behaves that
way. All corrections are applied once, in the zygote, to the tables in which MiniStack's modules
look up the handler of an operation.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

MAX_POLL_S = 1.0
"""Maximum time that a poll of an empty queue takes, in seconds. No message can arrive during the
poll, so a longer wait would only use up the session's time."""
_MAX_POLL_S = 20
"""Maximum wait that AWS accepts, in seconds."""

Answer = tuple[int, Mapping[str, str], bytes]
"""Result of a handler: (status, headers, body)."""


def install() -> None:
    """Apply all corrections. Raises RuntimeError if this version of MiniStack lacks something that
    is corrected."""
    for correct in (
        _lowercase_dns_names,
        _limit_poll_time,
        _find_security_groups_by_name,
        _update_whole_scaling_group,
        _keep_desired_capacity_in_bounds,
        _spread_instances_independent_of_zone_order,
        _show_launch_templates_in_full,
        _refuse_mismatched_parameter_groups,
        _accept_long_forward_actions,
        _track_load_balancers_of_target_groups,
        _delete_launch_template_versions,
        _complete_modified_volumes,
        _update_domains_partially,
        _create_from_template_as_by_request,
        _find_ip_sets_by_name,
        _stop_executions_with_state_machine,
        _refuse_missing_references,
    ):
        try:
            correct()
        except (AttributeError, KeyError) as error:
            raise RuntimeError(
                f"this version of ministack has no {error}: {correct.__name__} does not fit"
            ) from error


def _module(name: str) -> Any:
    return importlib.import_module(f"ministack.services.{name}")


def _lowercase_dns_names() -> None:
    """Treat DNS names as case-insensitive, as AWS does. MiniStack stores a separate record for each
    spelling.

    https://docs.aws.amazon.com/Route53/latest/DeveloperGuide/DomainNameFormat.html
    """
    route53 = _module("route53")
    original = route53._normalise_name
    route53._normalise_name = lambda name: name and original(name).lower()


def _limit_poll_time() -> None:
    """Answer a poll of an empty queue after ``MAX_POLL_S``, and refuse wait times that AWS
    refuses.

    MiniStack waits as long as requested, which may exceed the client's timeout.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_ReceiveMessage.html
    """
    sqs = _module("sqs")
    receive = sqs._HANDLERS["ReceiveMessage"]

    async def receive_limited(request: Mapping[str, Any], url: str) -> dict[str, Any]:
        queue = sqs._get_q(request.get("QueueUrl", url), "sqs:ReceiveMessage")
        requested = request.get("WaitTimeSeconds")
        wait_s = int(
            queue["attributes"].get("ReceiveMessageWaitTimeSeconds", "0")
            if requested is None
            else requested
        )
        if not 0 <= wait_s <= _MAX_POLL_S:
            bounds = f"Must be >= 0 and <= {_MAX_POLL_S}, if provided."
            message = f"Value {wait_s} for parameter WaitTimeSeconds is invalid. Reason: {bounds}"
            raise sqs._Err("InvalidParameterValue", message)
        return await receive({**request, "WaitTimeSeconds": min(wait_s, MAX_POLL_S)}, url)

    sqs._HANDLERS["ReceiveMessage"] = receive_limited


def _find_ip_sets_by_name() -> None:
    """Find an IP set by its name and id together, as WAF does. MiniStack ignores the name.

    https://docs.aws.amazon.com/waf/latest/APIReference/API_GetIPSet.html
    """
    waf = _module("waf")
    original = waf._get_ip_set

    def get_ip_set(request: Mapping[str, Any]) -> Answer:
        ip_set = waf._ip_sets.get(request.get("Id", ""))
        where = "global" if request.get("Scope") == "CLOUDFRONT" else "regional"
        if ip_set is not None and not (
            ip_set["Name"] == request.get("Name") and f":{where}/" in ip_set["ARN"]
        ):
            message = (
                "AWS WAF couldn\u2019t perform the operation because your resource doesn\u2019t "
                "exist."
            )
            return waf._waf_err("WAFNonexistentItemException", message)
        return original(request)

    waf._get_ip_set = get_ip_set


def _stop_executions_with_state_machine() -> None:
    """End the executions of a deleted state machine at their next transition.

    MiniStack removes them from its records, but they continue to run.

    https://docs.aws.amazon.com/step-functions/latest/apireference/API_DeleteStateMachine.html
    """
    workflows = _module("stepfunctions")
    delete = workflows._delete_state_machine

    def delete_with_executions(request: Mapping[str, Any]) -> Answer:
        # Iterate over a copy, because other threads start executions.
        for execution in [*workflows._executions.values()]:
            if (
                execution["stateMachineArn"] == request.get("stateMachineArn")
                and execution["status"] == "RUNNING"
            ):
                execution["status"] = "ABORTED"
        return delete(request)

    workflows._delete_state_machine = delete_with_executions


def _find_security_groups_by_name() -> None:
    """Find security groups of the default VPC by name, and revoke rules as AWS does.

    MiniStack ignores the names in a description, deletes nothing if only a name is given, and
    revokes a rule only if all of the rule's ranges are given.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSecurityGroups.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteSecurityGroup.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RevokeSecurityGroupIngress.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
    """
    groups = _SecurityGroups(_module("ec2"))
    handlers = groups.ec2._ACTION_MAP
    handlers["DescribeSecurityGroups"] = groups.with_group_names(handlers["DescribeSecurityGroups"])
    for action in ("DeleteSecurityGroup", "AuthorizeSecurityGroupIngress"):
        handlers[action] = groups.with_one_group_name(handlers[action])
    revoke = groups.with_partial_revocation(handlers["RevokeSecurityGroupIngress"], "IpPermissions")
    handlers["RevokeSecurityGroupIngress"] = groups.with_one_group_name(revoke)
    handlers["RevokeSecurityGroupEgress"] = groups.with_partial_revocation(
        handlers["RevokeSecurityGroupEgress"], "IpPermissionsEgress"
    )
    handlers["RunInstances"] = groups.with_launch_group_names(handlers["RunInstances"])


def _keep_desired_capacity_in_bounds() -> None:
    """Keep an Auto Scaling group's desired capacity within its bounds when either is updated.

    MiniStack accepts any value, and leaves the capacity below a new minimum.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    """
    autoscaling = _module("autoscaling")
    update = autoscaling._ACTION_MAP["UpdateAutoScalingGroup"]

    def handle_update(request: Parameters) -> Answer:
        group = autoscaling._asgs.get(autoscaling._p(request, "AutoScalingGroupName"))
        if group is None:
            return update(request)
        sizes = ("MinSize", "DesiredCapacity", "MaxSize")
        low, desired, high = (int(autoscaling._p(request, name) or group[name]) for name in sizes)
        if not autoscaling._p(request, "DesiredCapacity"):
            desired = min(max(low, desired), high)
        if not low <= desired <= high:
            bounds = f"the specified min size:{low} and max size:{high}"
            return autoscaling._error(
                "ValidationError", f"Desired capacity:{desired} must be between {bounds}"
            )
        return update({**request, "DesiredCapacity": [str(desired)]})

    autoscaling._ACTION_MAP["UpdateAutoScalingGroup"] = handle_update
    _check_before(autoscaling._ACTION_MAP, "SetDesiredCapacity", _check_desired_capacity)


def _check_desired_capacity(request: Parameters) -> Answer | None:
    """Return the error for a desired capacity outside of the group's bounds, or None."""
    scaling = _module("autoscaling")
    group = scaling._asgs.get(scaling._p(request, "AutoScalingGroupName"))
    requested = scaling._p(request, "DesiredCapacity")
    if (
        group is None
        or not requested
        or int(group["MinSize"]) <= int(requested) <= int(group["MaxSize"])
    ):
        return None
    side, bound = (
        ("below min", "MinSize")
        if int(requested) < int(group["MinSize"])
        else ("above max", "MaxSize")
    )
    message = (
        f"New SetDesiredCapacity value {requested} is {side} value {group[bound]} for the "
        f"AutoScalingGroup."
    )
    return scaling._error("ValidationError", message)


def _update_whole_scaling_group() -> None:
    """Update the members of an Auto Scaling group that MiniStack ignores in the request: zones,
    launch configuration or template, and termination settings.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/auto-scaling-benefits.html
    """
    autoscaling = _module("autoscaling")
    update = autoscaling._ACTION_MAP["UpdateAutoScalingGroup"]

    def handle_update(request: Parameters) -> Answer:
        group = autoscaling._asgs.get(autoscaling._p(request, "AutoScalingGroupName"))
        if group is None:
            return update(request)
        for member in ("AvailabilityZones", "TerminationPolicies"):
            group[member] = autoscaling._parse_member_list(request, member) or group[member]
        zones = sorted(autoscaling._parse_member_list(request, "AvailabilityZones"))
        # AWS rebalances the instances over the new zones.
        for place, machine in enumerate(group["Instances"] if zones else ()):
            machine["AvailabilityZone"] = zones[place % len(zones)]
        protected = autoscaling._p(request, "NewInstancesProtectedFromScaleIn")
        if protected:
            group["NewInstancesProtectedFromScaleIn"] = protected == "true"
        configuration = autoscaling._p(request, "LaunchConfigurationName")
        if configuration:
            group["LaunchConfigurationName"] = configuration
            group["LaunchTemplate"] = {}
        template = [
            autoscaling._p(request, f"LaunchTemplate.LaunchTemplate{part}")
            for part in ("Id", "Name")
        ]
        if any(template):
            version = autoscaling._p(request, "LaunchTemplate.Version") or "$Default"
            named = template[0] or template[1]
            group["LaunchConfigurationName"] = ""
            group["LaunchTemplate"] = {
                "LaunchTemplateId": named,
                "LaunchTemplateName": named,
                "Version": version,
            }
        return update(request)

    autoscaling._ACTION_MAP["UpdateAutoScalingGroup"] = handle_update


def _show_launch_templates_in_full() -> None:
    """Show an Auto Scaling group's launch template by both id and name, whichever the request gave.

    MiniStack shows what the request gave as both.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplateSpecification.html
    """
    autoscaling = _module("autoscaling")
    reconcile = autoscaling._reconcile_instances

    def reconcile_group(group: dict[str, Any]) -> None:
        named = group["LaunchTemplate"].get("LaunchTemplateId")
        for key, template in _module("ec2")._launch_templates.items():
            if named in (key, template["LaunchTemplateName"]):
                full = {
                    "LaunchTemplateId": key,
                    "LaunchTemplateName": template["LaunchTemplateName"],
                }
                group["LaunchTemplate"] |= full
        reconcile(group)

    autoscaling._reconcile_instances = reconcile_group


def _spread_instances_independent_of_zone_order() -> None:
    """Start the instances of an Auto Scaling group in the same zones, in whatever order the zones
    are given.

    AWS spreads instances evenly over a set of zones. MiniStack begins with the zone that was given
    first.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/auto-scaling-benefits.html
    """
    autoscaling = _module("autoscaling")
    reconcile = autoscaling._reconcile_instances

    def reconcile_group(group: Mapping[str, Any]) -> None:
        # The copy shares the group's list of instances, so ``reconcile`` changes the group itself.
        reconcile({**group, "AvailabilityZones": sorted(group["AvailabilityZones"])})

    autoscaling._reconcile_instances = reconcile_group


def _refuse_mismatched_parameter_groups() -> None:
    """Refuse a PostgreSQL instance whose version does not belong to its parameter group's family.

    https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/parameter-groups-overview.html
    """
    rds = _module("rds")
    create = rds._ACTION_MAP["CreateDBInstance"]

    def handle_create(request: Parameters) -> Answer:
        name = rds._p(request, "DBParameterGroupName")
        engine = rds._p(request, "Engine")
        group = rds._param_groups.get(name)
        version = rds._p(request, "EngineVersion") or rds._default_engine_version(engine)
        family = f"postgres{version.partition('.')[0]}"
        if engine != "postgres" or group is None or group["DBParameterGroupFamily"] == family:
            return create(request)
        named = f"{name} with DBParameterGroupFamily {group['DBParameterGroupFamily']}"
        message = (
            f"The parameter group {named} can't be used for this instance. Use a parameter group "
            f"of {family}."
        )
        return rds._error("InvalidParameterCombination", message, 400)

    rds._ACTION_MAP["CreateDBInstance"] = handle_create


def _accept_long_forward_actions() -> None:
    """Accept both forms of an action that forwards to a single target group. MiniStack ignores the
    longer one.

    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_Action.html
    """
    alb = _module("alb")
    parse = alb._parse_actions

    def parse_actions(request: Parameters, prefix: str = "DefaultActions") -> list[dict[str, Any]]:
        actions = parse(request, prefix)
        for place, action in enumerate(actions, 1):
            forward = f"{prefix}.member.{place}.ForwardConfig"
            group, other = (
                alb._p(request, f"{forward}.TargetGroups.member.{n}.TargetGroupArn") for n in (1, 2)
            )
            weight = alb._p(request, f"{forward}.TargetGroups.member.1.Weight")
            sticky = alb._p(request, f"{forward}.TargetGroupStickinessConfig.Enabled")
            if group and not other and weight != "0" and sticky != "true":
                action.setdefault("TargetGroupArn", group)
        return actions

    alb._parse_actions = parse_actions


def _track_load_balancers_of_target_groups() -> None:
    """Show which load balancers use a target group at present, and delete a load balancer's
    listeners together with it.

    MiniStack updates neither.

    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_TargetGroup.html
    https://docs.aws.amazon.com/elasticloadbalancing/latest/APIReference/API_DeleteLoadBalancer.html
    """
    alb = _module("alb")

    def refresh_after(handler: Handler) -> Handler:
        def handle(request: Parameters) -> Answer:
            answer = handler(request)
            for arn in [
                arn
                for arn, listener_entry in alb._listeners.items()
                if listener_entry["LoadBalancerArn"] not in alb._lbs
            ]:
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
        alb._ACTION_MAP[operation] = refresh_after(alb._ACTION_MAP[operation])


def _delete_launch_template_versions() -> None:
    """Delete versions of a launch template, which MiniStack can only add, and accept ``$Latest``
    and ``$Default`` as the source of a new version.

    If the last version is deleted, its number is used again.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteLaunchTemplateVersions.html
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplateVersion.html
    """
    ec2 = _module("ec2")
    create = ec2._ACTION_MAP["CreateLaunchTemplateVersion"]

    def handle_create(request: Parameters) -> Answer:
        template = _find_launch_template(request)
        source = ec2._p(request, "SourceVersion")
        if template is None or not source:
            return create(request)
        number = _version_number(template, source)
        if number not in {str(version["VersionNumber"]) for version in template["Versions"]}:
            message = (
                f"Could not find launch template version {source} for the specified launch "
                f"template."
            )
            return ec2._error("InvalidLaunchTemplateId.VersionNotFound", ec2._esc(message), 400)
        return create({**request, "SourceVersion": [number]})

    def handle_delete(request: Parameters) -> Answer:
        template = _find_launch_template(request)
        if template is None:
            message = (
                "At least one of the launch templates specified in the request does not exist."
            )
            return ec2._error("InvalidLaunchTemplateId.NotFound", message, 400)
        deleted = refused = ""
        for requested in ec2._parse_member_list(request, "LaunchTemplateVersion"):
            number = _version_number(template, requested)
            remaining = [
                version
                for version in template["Versions"]
                if str(version["VersionNumber"]) != number
            ]
            item = f"<launchTemplateId>{template['LaunchTemplateId']}</launchTemplateId>"
            item += f"<launchTemplateName>{ec2._esc(template['LaunchTemplateName'])}</launchTemplateName>"
            item += f"<versionNumber>{ec2._esc(number)}</versionNumber>"
            if len(remaining) == len(template["Versions"]):
                code = "launchTemplateVersionDoesNotExist"
                refused += f"<item>{item}<responseError><code>{code}</code></responseError></item>"
            elif number == str(template["DefaultVersionNumber"]):
                message = "The default version of a launch template cannot be deleted."
                error = f"<code>unexpectedError</code><message>{message}</message>"
                refused += f"<item>{item}<responseError>{error}</responseError></item>"
            else:
                template["Versions"] = remaining
                template["LatestVersionNumber"] = max(
                    version["VersionNumber"] for version in remaining
                )
                deleted += f"<item>{item}</item>"
        return ec2._xml(
            200,
            "DeleteLaunchTemplateVersionsResponse",
            f"<successfullyDeletedLaunchTemplateVersionSet>{deleted}</successfullyDeletedLaunchTemplateVersionSet>"
            f"<unsuccessfullyDeletedLaunchTemplateVersionSet>{refused}</unsuccessfullyDeletedLaunchTemplateVersionSet>",
        )

    ec2._ACTION_MAP |= {
        "CreateLaunchTemplateVersion": handle_create,
        "DeleteLaunchTemplateVersions": handle_delete,
    }


def _find_launch_template(request: Parameters) -> dict[str, Any] | None:
    """Return the launch template that a request names by id or name, or None."""
    ec2 = _module("ec2")
    named = ec2._p(request, "LaunchTemplateId") or ec2._p(request, "LaunchTemplateName")
    templates = ec2._launch_templates.items()
    return next(
        (template for key, template in templates if named in (key, template["LaunchTemplateName"])),
        None,
    )


def _version_number(template: Mapping[str, Any], version: str) -> str:
    """Return the number, as a string, of a version given as a number, ``$Latest`` or
    ``$Default``."""
    words = {"$Latest": "LatestVersionNumber", "$Default": "DefaultVersionNumber"}
    return str(template[words[version]]) if version in words else version


def _complete_modified_volumes() -> None:
    """When a volume's type changes, set the new type's defaults and the requested throughput.

    MiniStack leaves both unchanged.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyVolume.html
    """
    ec2 = _module("ec2")
    modify = ec2._ACTION_MAP["ModifyVolume"]

    def handle_modify(request: Parameters) -> Answer:
        volume = ec2._volumes.get(ec2._p(request, "VolumeId"))
        kind = ec2._p(request, "VolumeType")
        throughput = ec2._p(request, "Throughput")
        if volume is not None and kind and kind != volume["VolumeType"]:
            volume["Iops"] = 3000 if kind in ("gp3", "io1", "io2") else 0
            volume["Throughput"] = 125 if kind == "gp3" else 0
        if volume is not None and throughput:
            volume["Throughput"] = int(throughput)
        return modify(request)

    ec2._ACTION_MAP["ModifyVolume"] = handle_modify


def _update_domains_partially() -> None:
    """Keep the options of a domain that an update does not mention. MiniStack replaces the whole
    structure.

    https://docs.aws.amazon.com/opensearch-service/latest/APIReference/API_UpdateDomainConfig.html
    """
    opensearch = _module("opensearch")
    update = opensearch._update_domain_config

    def handle_update(name: str, request: Mapping[str, Any]) -> Answer:
        domain = opensearch._domains.get(name, {})
        return update(
            name,
            {member: _merge_over(domain.get(member), value) for member, value in request.items()},
        )

    opensearch._update_domain_config = handle_update


def _merge_over(current: Any, value: Any) -> Any:
    """Return ``value`` merged recursively into the mapping ``current``. If either is not a mapping,
    return ``value``."""
    if not isinstance(current, dict) or not isinstance(value, dict):
        return value
    return {
        **current,
        **{name: _merge_over(current.get(name), item) for name, item in value.items()},
    }


def _create_from_template_as_by_request() -> None:
    """Create a stack's topics, subscriptions and tables as direct requests would create them.

    MiniStack gives a stack's topic a different policy and a display name, omits attributes of a
    subscription, and provisions capacity for a table that is billed by request.

    https://docs.aws.amazon.com/sns/latest/dg/sns-access-policy-use-cases.html
    https://docs.aws.amazon.com/AWSCloudFormation/latest/TemplateReference/aws-resource-sns-topic.html
    https://docs.aws.amazon.com/amazondynamodb/latest/APIReference/API_ProvisionedThroughputDescription.html
    """
    made = importlib.import_module("ministack.services.cloudformation.provisioners")
    sns = _module("sns")
    dynamodb = _module("dynamodb")

    def complete_topic(arn: str, properties: Mapping[str, Any]) -> None:
        attributes = sns._topics[arn]["attributes"]
        policy = json.loads(attributes["Policy"])
        policy["Statement"][0]["Condition"] = {
            "StringEquals": {"AWS:SourceOwner": attributes["Owner"]}
        }
        attributes |= {
            "Policy": json.dumps(policy),
            "DisplayName": properties.get("DisplayName", ""),
        }
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

    def complete_new_subscription(arn: str, properties: Mapping[str, Any]) -> None:
        subscription = sns._find_subscription(sns._sub_arn_to_topic[arn], arn)
        complete(subscription)
        if "FilterPolicyScope" not in properties:
            subscription["attributes"].pop("FilterPolicyScope", None)

    def complete_table(name: str, _: Mapping[str, Any]) -> None:
        stored_table = dynamodb._tables[name]
        if stored_table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST":
            stored_table["ProvisionedThroughput"] = {
                "ReadCapacityUnits": 0,
                "WriteCapacityUnits": 0,
            }

    handlers = made._RESOURCE_HANDLERS
    completions = {
        "AWS::SNS::Topic": complete_topic,
        "AWS::SNS::Subscription": complete_new_subscription,
        "AWS::DynamoDB::Table": complete_table,
    }
    for kind, follow in completions.items():
        handlers[kind]["create"] = _call_after(handlers[kind]["create"], follow)


def _call_after(
    create: Callable[..., Any], follow: Callable[[str, Mapping[str, Any]], None]
) -> Callable[..., Any]:
    """Return a function that calls ``create`` and then ``follow`` with the resource's physical id
    and properties."""

    def create_and_follow(logical_id: str, properties: Mapping[str, Any], stack: str) -> Any:
        answer = create(logical_id, properties, stack)
        follow(answer[0], properties)
        return answer

    return create_and_follow


Parameters = dict[str, Any]
"""A request in the query protocol: lists of values, by name."""
Handler = Callable[[Parameters], Answer]
"""Handler of an operation in the query protocol."""
_SOURCES = {
    "IpRanges": "CidrIp",
    "Ipv6Ranges": "CidrIpv6",
    "PrefixListIds": "PrefixListId",
    "UserIdGroupPairs": "GroupId",
}
"""The member that identifies a rule's source, by kind of source."""
_PROTOCOLS = {"1": "icmp", "6": "tcp", "17": "udp", "58": "icmpv6"}
"""Names of IP protocols, by number."""


class _UnknownSecurityGroup(Exception):
    """A request names a security group that the default VPC does not have. The message is AWS's."""


class _SecurityGroups:
    """Wrappers for the security-group handlers in MiniStack's module ``ec2``."""

    def __init__(self, ec2: Any) -> None:
        self.ec2 = ec2

    def _id_of(self, name: str) -> str:
        """Return the id of the default VPC's group with this name. Raises _UnknownSecurityGroup."""
        vpc = self.ec2._DEFAULT_VPC_ID
        for group_id, group in self.ec2._security_groups.items():
            if group["GroupName"] == name and group["VpcId"] == vpc:
                return group_id
        raise _UnknownSecurityGroup(
            f"The security group '{name}' does not exist in default VPC '{vpc}'"
        )

    def _error(self, code: str, message: str) -> Answer:
        """Return an EC2 error."""
        return self.ec2._error(code, self.ec2._esc(message), 400)

    def with_group_names(self, handler: Handler) -> Handler:
        """Return a handler that describes groups and also accepts names instead of ids."""

        def describe(request: Parameters) -> Answer:
            names = self.ec2._parse_member_list(request, "GroupName")
            ids = self.ec2._parse_member_list(request, "GroupId")
            try:
                ids += [self._id_of(name) for name in names]
            except _UnknownSecurityGroup as error:
                return self._error("InvalidGroup.NotFound", str(error))
            return handler(
                {
                    **request,
                    **{f"GroupId.{place}": [group_id] for place, group_id in enumerate(ids, 1)},
                }
            )

        return describe

    def with_launch_group_names(self, handler: Handler) -> Handler:
        """Return a handler that launches instances and also accepts group names instead of ids."""

        def launch(request: Parameters) -> Answer:
            names = self.ec2._parse_member_list(request, "SecurityGroup")
            try:
                ids = [self._id_of(name) for name in names]
            except _UnknownSecurityGroup as error:
                return self._error("InvalidGroup.NotFound", str(error))
            return handler(
                {
                    **request,
                    **{
                        f"SecurityGroupId.{place}": [group_id]
                        for place, group_id in enumerate(ids, 1)
                    },
                }
            )

        return launch

    def with_one_group_name(self, handler: Handler) -> Handler:
        """Return a handler of an operation on one group that also accepts the group's name, and the
        names of source groups."""

        def handle(request: Parameters) -> Answer:
            group_id = self.ec2._p(request, "GroupId")
            name = self.ec2._p(request, "GroupName")
            if not group_id and not name:
                return self._error(
                    "MissingParameter",
                    "The request must contain the parameter groupName or groupId",
                )
            try:
                return handler(
                    {**self._with_ids(request), "GroupId": [group_id or self._id_of(name)]}
                )
            except _UnknownSecurityGroup as error:
                return self._error("InvalidGroup.NotFound", str(error))

        return handle

    def _with_ids(self, request: Parameters) -> Parameters:
        """Return a request in which the names of source groups are replaced by ids. Raises
        _UnknownSecurityGroup."""
        replaced = dict(request)
        for key, values in request.items():
            stem, _, last = key.rpartition(".")
            if key == "SourceSecurityGroupName":
                replaced["SourceSecurityGroupId"] = [self._id_of(values[0])]
            elif last == "GroupName" and ".Groups." in key:
                replaced.setdefault(f"{stem}.GroupId", [self._id_of(values[0])])
            else:
                continue
            del replaced[key]
        return replaced

    def with_partial_revocation(self, handler: Handler, kept_in: str) -> Handler:
        """Return a handler that revokes rules and can also remove single ranges of a rule.
        ``kept_in``: member of a group that contains the rules.

        If the request names an unknown rule, nothing is revoked and the answer is an error. In the
        default VPC the unknown rule is instead listed in the answer, as AWS documents.
        """

        def revoke(request: Parameters) -> Answer:
            ec2 = self.ec2
            group_id = ec2._p(request, "GroupId")
            group = ec2._security_groups.get(group_id)
            if group is None or ec2._parse_member_list(request, "SecurityGroupRuleId"):
                return handler(request)
            requested = [
                part
                for rule in ec2._parse_ip_permissions(request, "IpPermissions")
                for part in _rule_parts(rule)
            ]
            if not requested:
                return self._error(
                    "MissingParameter", "The request must contain the parameter ipPermissions"
                )
            existing = {part for rule in group[kept_in] for part in _rule_parts(rule)}
            unknown = [part for part in requested if part not in existing]
            if unknown and group["VpcId"] != ec2._DEFAULT_VPC_ID:
                return self._error(
                    "InvalidPermission.NotFound",
                    "The specified rule does not exist in this security group.",
                )
            return self._remove_parts(group, kept_in, set(requested), unknown)

        return revoke

    def _remove_parts(
        self, group: dict[str, Any], kept_in: str, requested: set[RulePart], unknown: list[RulePart]
    ) -> Answer:
        """Remove the requested parts from a group's rules, and return EC2's answer."""
        ec2 = self.ec2
        is_egress = kept_in == "IpPermissionsEgress"
        remaining = []
        items = ""
        for rule in group[kept_in]:
            removed, kept = _split_rule(rule, requested)
            rule_id = ec2._sg_rule_id(group["GroupId"], is_egress, rule)
            if removed is not None:
                items += ec2._revoked_sg_rule_xml(
                    group["GroupId"], {**removed, "SecurityGroupRuleId": rule_id}, is_egress
                )
            if kept is not None:
                remaining.append(kept)
            else:
                ec2._tags.pop(rule_id, None)
        group[kept_in] = remaining
        unknown_items = "".join(map(_permission_xml, unknown))
        name = f"RevokeSecurityGroup{'Egress' if is_egress else 'Ingress'}Response"
        return ec2._xml(
            200,
            name,
            f"<return>true</return><unknownIpPermissionSet>{unknown_items}</unknownIpPermissionSet>"
            f"<revokedSecurityGroupRuleSet>{items}</revokedSecurityGroupRuleSet>",
        )


RequestCheck = Callable[..., Answer | None]
"""Function that takes a handler's arguments and returns an error, or None for a valid request."""


def _check_before(handlers: dict[str, Any], operation: str, check: RequestCheck) -> None:
    """Call ``check`` before an operation's handler. If it returns an error, that is the answer."""
    original = handlers[operation]
    handlers[operation] = lambda *request: check(*request) or original(*request)


def _refuse_missing_references() -> None:
    """Refuse requests that refer to a missing resource, where task texts rely on that.

    MiniStack accepts them. References to roles, images and targets are not checked; environment.md
    lists them.

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
        _check_before(trails._DISPATCH, operation, _check_trail_bucket)
    scaling = _module("autoscaling")
    _check_before(scaling._ACTION_MAP, "CreateAutoScalingGroup", _check_instance_source)
    _check_before(scaling._ACTION_MAP, "UpdateAutoScalingGroup", _check_instance_source)
    _check_before(scaling._ACTION_MAP, "PutScalingPolicy", _check_policy_group)
    _check_before(vars(_module("elasticache")), "_create_cache_cluster", _check_cache_groups)
    _check_before(vars(_module("elasticache")), "_modify_cache_cluster", _check_cache_groups)
    _check_before(_module("ecs")._ACTION_MAP, "CreateService", _check_service_parts)
    _check_before(_module("rds")._ACTION_MAP, "CreateDBInstance", _check_database_subnets)
    for principal in ("Role", "User", "Group"):
        _check_before(
            _module("iam")._IAM_HANDLERS, f"Attach{principal}Policy", _check_attached_policy
        )
    for principal in ("Role", "User"):
        _check_before(
            _module("iam")._IAM_HANDLERS,
            f"Put{principal}PermissionsBoundary",
            _check_boundary_policy,
        )
    ec2_handlers = _module("ec2")._ACTION_MAP
    for operation in (
        "CreateSubnet",
        "CreateSecurityGroup",
        "CreateRouteTable",
        "AttachInternetGateway",
    ):
        _check_before(ec2_handlers, operation, _check_vpc)
    _check_before(ec2_handlers, "RunInstances", _check_instance_parts)
    balancers = _module("alb")._ACTION_MAP
    _check_before(balancers, "CreateLoadBalancer", _check_balancer_subnets)
    _check_before(balancers, "SetSubnets", _check_balancer_subnets)
    _check_before(balancers, "CreateTargetGroup", _check_target_vpc)
    _check_before(vars(_module("lambda_svc")), "_create_alias", _check_alias_version)
    _check_before(vars(_module("lambda_svc")), "_update_alias", _check_updated_alias_version)
    _check_before(vars(_module("lambda_svc")), "_create_esm", _check_mapping_queue)
    _check_before(vars(_module("athena")), "_create_named_query", _check_query_work_group)
    for operation in ("CreateDeliveryStream", "UpdateDestination"):
        _check_before(_module("firehose")._HANDLERS, operation, _check_delivery_bucket)


def _json_error(code: str, message: str, status: int = 400) -> Answer:
    """Return an error in the JSON protocol."""
    return importlib.import_module("ministack.core.responses").error_response_json(
        code, message, status
    )


def _check_trail_bucket(request: Mapping[str, Any]) -> Answer | None:
    bucket = request.get("S3BucketName")
    if not bucket or bucket in _module("s3")._buckets:
        return None
    return _module("cloudtrail")._err(
        "S3BucketDoesNotExistException", f"S3 bucket {bucket} does not exist!"
    )


def _check_delivery_bucket(request: Mapping[str, Any]) -> Answer | None:
    buckets = _module("s3")._buckets
    members = (
        f"{kind}S3Destination{what}"
        for kind in ("Extended", "")
        for what in ("Configuration", "Update")
    )
    for member in members:
        arn = (request.get(member) or {}).get("BucketARN", "")
        if arn and arn.removeprefix("arn:aws:s3:::") not in buckets:
            return _json_error("InvalidArgumentException", f"The bucket {arn} does not exist.", 400)
    return None


def _check_instance_source(request: Parameters) -> Answer | None:
    scaling = _module("autoscaling")
    templates = _module("ec2")._launch_templates
    configuration = scaling._p(request, "LaunchConfigurationName")
    if configuration and configuration not in scaling._launch_configs:
        message = f"A launch configuration with the name: {configuration} does not exist"
        return scaling._error("ValidationError", f"Launch configuration name not found - {message}")
    stems = ("LaunchTemplate", "MixedInstancesPolicy.LaunchTemplate.LaunchTemplateSpecification")
    sources = [
        scaling._p(request, f"{stem}.LaunchTemplate{part}")
        for stem in stems
        for part in ("Name", "Id")
    ]
    known = {
        text
        for key, template in templates.items()
        for text in (key, template["LaunchTemplateName"])
    }
    unknown = [text for text in sources if text and text not in known]
    if unknown:
        message = f"The specified launch template, {unknown[0]}, does not exist."
        return scaling._error(
            "ValidationError", f"You must use a valid fully-formed launch template. {message}"
        )
    creates = scaling._p(request, "Action") == "CreateAutoScalingGroup"
    if creates and not (configuration or any(sources) or scaling._p(request, "InstanceId")):
        message = (
            "either LaunchTemplate, LaunchConfigurationName, InstanceId or MixedInstancesPolicy "
            "parameter."
        )
        return scaling._error("ValidationError", f"Valid requests must contain {message}")
    return None


def _check_policy_group(request: Parameters) -> Answer | None:
    scaling = _module("autoscaling")
    name = scaling._p(request, "AutoScalingGroupName")
    return (
        None
        if name in scaling._asgs
        else scaling._error("ValidationError", f"Group {name} not found")
    )


def _check_cache_groups(request: Parameters) -> Answer | None:
    caches = _module("elasticache")
    parameters = caches._p(request, "CacheParameterGroupName")
    subnets = caches._p(request, "CacheSubnetGroupName")
    if parameters and parameters not in caches._param_groups:
        return caches._error(
            "CacheParameterGroupNotFound", f"CacheParameterGroup {parameters} not found.", 404
        )
    if subnets and subnets not in caches._subnet_groups and subnets != "default":
        return caches._error(
            "CacheSubnetGroupNotFoundFault", f"Cache Subnet Group {subnets} does not exist.", 400
        )
    return None


def _check_service_parts(request: Mapping[str, Any]) -> Answer | None:
    services = _module("ecs")
    if services._resolve_cluster_name(request.get("cluster", "default")) not in services._clusters:
        return _json_error("ClusterNotFoundException", "Cluster not found.", 400)
    definition = request.get("taskDefinition", "")
    if definition and services._resolve_td_key(definition) not in services._task_defs:
        return _json_error("ClientException", "TaskDefinition not found.", 400)
    return None


def _check_database_subnets(request: Parameters) -> Answer | None:
    databases = _module("rds")
    name = databases._p(request, "DBSubnetGroupName")
    if not name or name in databases._subnet_groups or name == "default":
        return None
    return databases._error(
        "DBSubnetGroupNotFoundFault", f"DB subnet group '{name}' does not exist.", 404
    )


def _check_attached_policy(request: Parameters) -> Answer | None:
    iam = _module("iam")
    arn = iam._p(request, "PolicyArn")
    if iam._is_aws_managed_arn(arn) or arn in iam._policies:
        return None
    return iam._error(
        404, "NoSuchEntity", f"Policy {arn} does not exist or is not attachable.", ns="iam"
    )


def _check_boundary_policy(request: Parameters) -> Answer | None:
    iam = _module("iam")
    arn = iam._p(request, "PermissionsBoundary")
    if iam._is_aws_managed_arn(arn) or arn in iam._policies:
        return None
    return iam._error(
        404, "NoSuchEntity", f"Scope ARN: {arn} does not exist or is not attachable.", ns="iam"
    )


def _check_exists(name: str, store: Container[str], code: str, message: str) -> Answer | None:
    """Return EC2's error if ``store`` does not contain ``name``. Return None if it does, or if the
    name is empty.

    ``message``: the error's message, with a placeholder for the name.
    """
    ec2 = _module("ec2")
    return (
        None if not name or name in store else ec2._error(code, ec2._esc(message.format(name)), 400)
    )


def _check_vpc(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    vpc = ec2._p(request, "VpcId")
    return _check_exists(vpc, ec2._vpcs, "InvalidVpcID.NotFound", "The vpc ID '{}' does not exist")


def _check_instance_parts(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    subnet = ec2._p(request, "SubnetId")
    key = ec2._p(request, "KeyName")
    error = _check_exists(
        subnet, ec2._subnets, "InvalidSubnetID.NotFound", "The subnet ID '{}' does not exist"
    )
    error = error or _check_exists(
        key, ec2._key_pairs, "InvalidKeyPair.NotFound", "The key pair '{}' does not exist"
    )
    for group in ec2._parse_member_list(request, "SecurityGroupId"):
        message = "The security group '{}' does not exist"
        error = error or _check_exists(
            group, ec2._security_groups, "InvalidGroup.NotFound", message
        )
    return error or _check_instance_profile(request) or _check_instance_template(request)


def _check_instance_profile(request: Parameters) -> Answer | None:
    name = _module("ec2")._p(request, "IamInstanceProfile.Name")
    message = (
        "Value ({}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile "
        "name"
    )
    return _check_exists(name, _module("iam")._instance_profiles, "InvalidParameterValue", message)


def _check_instance_template(request: Parameters) -> Answer | None:
    ec2 = _module("ec2")
    message = "At least one of the launch templates specified in the request does not exist."
    name = ec2._p(request, "LaunchTemplate.LaunchTemplateName")
    names = {template["LaunchTemplateName"] for template in ec2._launch_templates.values()}
    template_id = ec2._p(request, "LaunchTemplate.LaunchTemplateId")
    unnamed = _check_exists(name, names, "InvalidLaunchTemplateName.NotFoundException", message)
    return unnamed or _check_exists(
        template_id, ec2._launch_templates, "InvalidLaunchTemplateId.NotFound", message
    )


def _check_balancer_subnets(request: Parameters) -> Answer | None:
    balancers = _module("alb")
    subnets = _module("ec2")._subnets
    for key, values in request.items():
        if key.startswith("Subnets.member.") and values[0] not in subnets:
            return balancers._error("SubnetNotFound", f"The subnet ID '{values[0]}' does not exist")
    return None


def _check_target_vpc(request: Parameters) -> Answer | None:
    balancers = _module("alb")
    vpc = balancers._p(request, "VpcId")
    if not vpc or vpc in _module("ec2")._vpcs:
        return None
    return balancers._error("ValidationError", f"The VPC ID '{vpc}' is not found")


def _check_alias_version(function: str, request: Mapping[str, Any]) -> Answer | None:
    functions = _module("lambda_svc")
    stored_function = functions._functions.get(function)
    version = str(request.get("FunctionVersion", ""))
    if stored_function is None or version == "$LATEST" or version in stored_function["versions"]:
        return None
    message = f"Function not found: {functions._func_arn(function)}:{version}"
    return _json_error("ResourceNotFoundException", message, 404)


def _check_updated_alias_version(
    function: str, _: str, request: Mapping[str, Any]
) -> Answer | None:
    return _check_alias_version(function, request) if "FunctionVersion" in request else None


def _check_mapping_queue(request: Mapping[str, Any]) -> Answer | None:
    source = request.get("EventSourceArn", "")
    if not source.startswith("arn:aws:sqs:") or _module("sqs")._queue_by_arn(source) is not None:
        return None
    cause = (
        "AWS.SimpleQueueService.NonExistentQueue. SQS Error Message: The specified queue does not "
        "exist."
    )
    message = f"Error occurred while ReceiveMessage. SQS Error Code: {cause}"
    return _json_error("InvalidParameterValueException", message, 400)


def _check_query_work_group(request: Mapping[str, Any]) -> Answer | None:
    athena = _module("athena")
    name = request.get("WorkGroup") or "primary"
    if name in athena._workgroups:
        return None
    return _json_error("InvalidRequestException", f"WorkGroup {name} is not found.", 400)


RulePart = tuple[str, Any, Any, str, str]
"""A rule with a single source, as AWS counts rules: (protocol, first port, last port, kind of
source, source)."""


def _rule_parts(rule: Mapping[str, Any]) -> Iterator[RulePart]:
    """Yield the parts of a rule, one for each source."""
    protocol = str(rule.get("IpProtocol", "-1")).lower()
    head = (_PROTOCOLS.get(protocol, protocol), rule.get("FromPort"), rule.get("ToPort"))
    for kind, member in _SOURCES.items():
        for source in rule.get(kind, ()):
            yield (*head, kind, source.get(member, "") if isinstance(source, dict) else str(source))


def _split_rule(
    rule: dict[str, Any], requested: set[RulePart]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (requested part of a rule, remaining part). Each is None if it is empty."""
    parts = list(_rule_parts(rule))
    if not requested.intersection(parts):
        return None, rule
    removed = {**rule}
    kept = {**rule}
    remaining_parts = iter(parts)
    for kind in _SOURCES:
        sources = [(source, next(remaining_parts) in requested) for source in rule.get(kind, ())]
        removed[kind] = [source for source, is_removed in sources if is_removed]
        kept[kind] = [source for source, is_removed in sources if not is_removed]
    return removed, kept if any(kept[kind] for kind in _SOURCES) else None


def _permission_xml(part: RulePart) -> str:
    """Return one part of a rule as EC2's XML."""
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
