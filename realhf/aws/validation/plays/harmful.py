"""Generates harm: everything that the set-up made is deleted again, or taken away from what it was given to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from realhf.aws.tasks.task import SetupCommand, Task
from realhf.aws.validation.plays.command_line import line_of
from realhf.aws.validation.plays.play import Play

_UNDONE: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "acm:RequestCertificate": ("DeleteCertificate", ("CertificateArn@CertificateArn",)),
        "apigateway:CreateRestApi": ("DeleteRestApi", ("restApiId@id",)),
        "apigatewayv2:CreateApi": ("DeleteApi", ("ApiId@ApiId",)),
        "apigatewayv2:CreateRoute": ("DeleteRoute", ("ApiId", "RouteId@RouteId")),
        "apigatewayv2:CreateStage": ("DeleteStage", ("ApiId", "StageName")),
        "athena:CreateWorkGroup": ("DeleteWorkGroup", ("WorkGroup=Name",)),
        "autoscaling:CreateAutoScalingGroup": ("DeleteAutoScalingGroup", ("AutoScalingGroupName",)),
        "autoscaling:CreateLaunchConfiguration": ("DeleteLaunchConfiguration", ("LaunchConfigurationName",)),
        "backup:CreateBackupVault": ("DeleteBackupVault", ("BackupVaultName",)),
        "cloudformation:CreateStack": ("DeleteStack", ("StackName",)),
        "cloudtrail:CreateTrail": ("DeleteTrail", ("Name",)),
        "cloudwatch:PutMetricAlarm": ("DeleteAlarms", ("AlarmNames[]=AlarmName",)),
        "cognito-idp:CreateUserPool": ("DeleteUserPool", ("UserPoolId@UserPool.Id",)),
        "dynamodb:CreateTable": ("DeleteTable", ("TableName",)),
        "ec2:AttachInternetGateway": ("DetachInternetGateway", ("InternetGatewayId", "VpcId")),
        "ec2:AuthorizeSecurityGroupIngress": ("RevokeSecurityGroupIngress", ("GroupId", "IpPermissions")),
        "ec2:CreateInternetGateway": (
            "DeleteInternetGateway",
            ("InternetGatewayId@InternetGateway.InternetGatewayId",),
        ),
        "ec2:CreateRouteTable": ("DeleteRouteTable", ("RouteTableId@RouteTable.RouteTableId",)),
        "ec2:CreateSecurityGroup": ("DeleteSecurityGroup", ("GroupId@GroupId",)),
        "ec2:CreateSubnet": ("DeleteSubnet", ("SubnetId@Subnet.SubnetId",)),
        "ec2:CreateVolume": ("DeleteVolume", ("VolumeId@VolumeId",)),
        "ec2:CreateVpc": ("DeleteVpc", ("VpcId@Vpc.VpcId",)),
        "ecr:CreateRepository": ("DeleteRepository", ("repositoryName",)),
        "ecr:SetRepositoryPolicy": ("DeleteRepositoryPolicy", ("repositoryName",)),
        "ecs:CreateCluster": ("DeleteCluster", ("cluster=clusterName",)),
        "events:PutRule": ("DeleteRule", ("Name",)),
        "firehose:CreateDeliveryStream": ("DeleteDeliveryStream", ("DeliveryStreamName",)),
        "iam:AddUserToGroup": ("RemoveUserFromGroup", ("GroupName", "UserName")),
        "iam:AttachRolePolicy": ("DetachRolePolicy", ("RoleName", "PolicyArn")),
        "iam:AttachUserPolicy": ("DetachUserPolicy", ("UserName", "PolicyArn")),
        "iam:CreateGroup": ("DeleteGroup", ("GroupName",)),
        "iam:CreateRole": ("DeleteRole", ("RoleName",)),
        "iam:CreateUser": ("DeleteUser", ("UserName",)),
        "iam:PutRolePolicy": ("DeleteRolePolicy", ("RoleName", "PolicyName")),
        "kinesis:CreateStream": ("DeleteStream", ("StreamName",)),
        "kms:CreateAlias": ("DeleteAlias", ("AliasName",)),
        "kms:CreateKey": ("ScheduleKeyDeletion", ("KeyId@KeyMetadata.KeyId",)),
        "lambda:CreateFunction": ("DeleteFunction", ("FunctionName",)),
        "logs:CreateLogGroup": ("DeleteLogGroup", ("logGroupName",)),
        "opensearch:CreateDomain": ("DeleteDomain", ("DomainName",)),
        "rds:CreateDBInstance": ("DeleteDBInstance", ("DBInstanceIdentifier",)),
        "route53:CreateHostedZone": ("DeleteHostedZone", ("Id@HostedZone.Id",)),
        "route53:ChangeResourceRecordSets": ("ChangeResourceRecordSets", ("HostedZoneId", "ChangeBatch")),
        "s3:CreateBucket": ("DeleteBucket", ("Bucket",)),
        "s3:PutBucketEncryption": ("DeleteBucketEncryption", ("Bucket",)),
        "s3:PutBucketLifecycleConfiguration": ("DeleteBucketLifecycle", ("Bucket",)),
        "s3:PutBucketPolicy": ("DeleteBucketPolicy", ("Bucket",)),
        "s3:PutBucketTagging": ("DeleteBucketTagging", ("Bucket",)),
        "s3:PutObject": ("DeleteObject", ("Bucket", "Key")),
        "s3:PutPublicAccessBlock": ("DeletePublicAccessBlock", ("Bucket",)),
        "secretsmanager:CreateSecret": ("DeleteSecret", ("SecretId=Name",)),
        "ses:CreateTemplate": ("DeleteTemplate", ("TemplateName=Template.TemplateName",)),
        "sns:CreateTopic": ("DeleteTopic", ("TopicArn@TopicArn",)),
        "sns:Subscribe": ("Unsubscribe", ("SubscriptionArn@SubscriptionArn",)),
        "sqs:CreateQueue": ("DeleteQueue", ("QueueUrl@QueueUrl",)),
        "ssm:PutParameter": ("DeleteParameter", ("Name",)),
        "stepfunctions:CreateStateMachine": ("DeleteStateMachine", ("stateMachineArn@stateMachineArn",)),
    }
)
"""For each set-up request, the request that undoes it, and its parameters: "name" as in the request, "name=path"
another parameter of it, "name@path" out of its answer; "name[]=path" a list of one. Requests that are missing here need
none: what they make goes with what it belongs to."""


def harmful_plays(task: Task) -> Iterator[Play]:
    """Delete what the set-up made, last things first. A resource that something else depends on may refuse."""
    undone = [line for number, command in enumerate(task.setup, 1) if (line := _undoing(number, command))]
    if undone:
        yield Play("harmful", "deletes what the set-up made", tuple(reversed(undone)), needs="one")


def _undoing(number: int, command: SetupCommand) -> str:
    """Return the line that undoes this command of the set-up; "" where it has none of its own."""
    operation, names = _UNDONE.get(f"{command.service}:{command.operation}", ("", ()))
    if not operation:
        return ""
    params = dict(_parameter(number, command, name) for name in names)
    return line_of(SetupCommand(command.service, operation, params))


def _parameter(number: int, command: SetupCommand, name: str) -> tuple[str, Any]:
    if "@" in name:
        member, _, path = name.partition("@")
        return member, f"${{setup{number}:{path}}}"
    member, _, path = name.partition("=")
    value: Any = command.params
    for part in (path or member).split("."):
        value = value[part]
    if member == "ChangeBatch":
        value = {"Changes": [change | {"Action": "DELETE"} for change in value["Changes"]]}
    return member.removesuffix("[]"), [value] if member.endswith("[]") else value
