"""What a service updates in place is what it shows afterwards: each served operation that corrects
a setting, against a real simulator. An agent that made something with one wrong setting need not
remove it."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.differences import EpisodeComparison, Freedom, Goal, Target
from realhf.aws.grading.snapshot import take_snapshot
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.captures import resolve

pytestmark = [pytest.mark.sim, pytest.mark.slow]

ROLE = "arn:aws:iam::000000000000:role/r"
_ROLE = (
    "iam create-role --role-name r --assume-role-policy-document "
    '\'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":"*"},"Action":"sts:AssumeRole"}]}\''
)
_FUNCTION = (
    "lambda create-function --function-name f --package-type Image "
    f"--code ImageUri=000000000000.dkr.ecr.us-east-1.amazonaws.com/f:1 --role {ROLE}"
)
_QUEUE = "sqs create-queue --queue-name q"
_MAPPING = (
    "lambda create-event-source-mapping --function-name f --batch-size 1 "
    "--event-source-arn arn:aws:sqs:us-east-1:000000000000:q"
)
_CACHE = (
    "elasticache create-cache-cluster --cache-cluster-id c --engine redis --cache-node-type "
    "cache.t3.micro"
)
_NETWORK = (
    "ec2 create-vpc --cidr-block 10.0.0.0/16",
    "ec2 create-subnet --vpc-id ${step1:Vpc.VpcId} --cidr-block 10.0.1.0/24 --availability-zone "
    "us-east-1a",
    "ec2 create-subnet --vpc-id ${step1:Vpc.VpcId} --cidr-block 10.0.2.0/24 --availability-zone "
    "us-east-1b",
    "ec2 create-security-group --group-name g --description g --vpc-id ${step1:Vpc.VpcId}",
)
_GATEWAY = (
    "ec2 create-internet-gateway",
    "ec2 attach-internet-gateway --vpc-id ${step1:Vpc.VpcId} "
    "--internet-gateway-id ${step7:InternetGateway.InternetGatewayId}",
)
_BALANCER = (
    *_NETWORK,
    "elbv2 create-load-balancer --name b --subnets ${step2:Subnet.SubnetId} "
    "${step3:Subnet.SubnetId}",
    "elbv2 create-target-group --name one --protocol HTTP --port 80 --vpc-id ${step1:Vpc.VpcId}",
    "elbv2 create-target-group --name two --protocol HTTP --port 80 --vpc-id ${step1:Vpc.VpcId}",
)
_ARN = "${step5:LoadBalancers[0].LoadBalancerArn}"
_TARGETS = "${step6:TargetGroups[0].TargetGroupArn}"
_OTHERS = "${step7:TargetGroups[0].TargetGroupArn}"
_TEMPLATE = (
    "ec2 create-launch-template --launch-template-name template --launch-template-data "
    "InstanceType=t3.nano"
)
_VERSION = (
    "ec2 create-launch-template-version --launch-template-name template --source-version 1 "
    "--launch-template-data InstanceType=t3.micro"
)
_HTTP_API = "apigatewayv2 create-api --name a --protocol-type HTTP"
_REST_API = "apigateway create-rest-api --name a"
_RESOURCES = "apigateway get-resources --rest-api-id ${step1:id}"
_PLAN = "apigateway create-usage-plan --name p --quota limit=5,period=DAY"
_METHOD = (
    _REST_API,
    _RESOURCES,
    "apigateway put-method --rest-api-id ${step1:id} --resource-id ${step2:items[0].id} "
    "--http-method GET "
    "--authorization-type NONE",
)
_DEPLOYMENT = "apigateway create-deployment --rest-api-id ${step1:id} --stage-name s"
_PROJECT = (
    "codebuild create-project --name project --source type=NO_SOURCE,buildspec=b --artifacts "
    "type=NO_ARTIFACTS "
    f"--environment type=LINUX_CONTAINER,image=i,computeType=BUILD_GENERAL1_SMALL --service-role "
    f"{ROLE}"
)
_TABLE = "glue create-table --database-name d --table-input Name=t,TableType=EXTERNAL_TABLE"
_PLAN_OF_BACKUPS = (
    'BackupPlanName={},Rules=[{{RuleName=r,TargetBackupVaultName=v,ScheduleExpression="cron({} 5 ? '
    '* * *)"}}]'
)
_CONFIGURATION = (
    "autoscaling create-launch-configuration --launch-configuration-name l --image-id ami-1 "
    "--instance-type t3.nano"
)
_GROUP = (
    "autoscaling create-auto-scaling-group --auto-scaling-group-name g --launch-configuration-name "
    "l --min-size 0 "
    "--max-size 2 --availability-zones us-east-1a"
)
_STREAM = (
    "firehose create-delivery-stream --delivery-stream-name d "
    "--extended-s3-destination-configuration "
    f"RoleARN={ROLE},BucketARN=arn:aws:s3:::bucket,Prefix=old/"
)
_DATABASE = (
    "rds create-db-instance --db-instance-identifier d --db-instance-class db.t3.micro --engine "
    "mysql "
    "--master-username u --master-user-password passpass --allocated-storage 20"
)
_POOL = "cognito-idp create-user-pool --pool-name p"
_CLIENT = "cognito-idp create-user-pool-client --user-pool-id ${step1:UserPool.Id} --client-name c"
_USER = (
    "cognito-idp admin-create-user --user-pool-id ${step1:UserPool.Id} --username u "
    "--user-attributes Name=email,Value=old@example.com --message-action SUPPRESS"
)
_MACHINE = (
    "ec2 run-instances --image-id ami-1 --instance-type t3.nano --placement "
    "AvailabilityZone=us-east-1a"
)
_CACHE_PARAMETERS = (
    "elasticache create-cache-parameter-group --cache-parameter-group-name p "
    "--cache-parameter-group-family redis7 "
    "--description d"
)
_CACHE_PARAMETER = (
    "--cache-parameter-group-name p --parameter-name-values "
    "ParameterName=maxmemory-policy,ParameterValue=allkeys-lru"
)
_DATABASE_PARAMETERS = (
    "rds create-db-parameter-group --db-parameter-group-name p --db-parameter-group-family "
    "postgres16 --description d"
)
_DATABASE_PARAMETER = (
    "--db-parameter-group-name p "
    "--parameters ParameterName=max_connections,ParameterValue=77,ApplyMethod=pending-reboot"
)


@dataclass(frozen=True)
class Update:
    """Holds an update: ``made`` by these lines, corrected by ``line``; ``look`` shows ``shown``
    only afterwards."""

    made: tuple[str, ...]
    line: str
    look: str
    shown: Any
    instead: tuple[tuple[str, str], ...] = ()
    """Texts of ``made`` and what stands there where it is made right at once; none where no command
    can."""

    @property
    def operation(self) -> str:
        """Service and operation."""
        return " ".join(self.line.split()[:2])


UPDATES = (
    Update(
        ("acm request-certificate --domain-name a.example.com",),
        "acm update-certificate-options --certificate-arn ${step1:CertificateArn} "
        "--options CertificateTransparencyLoggingPreference=DISABLED",
        "acm describe-certificate --certificate-arn ${step1:CertificateArn} --query "
        "Certificate.Options."
        "CertificateTransparencyLoggingPreference",
        "DISABLED",
    ),
    Update(
        ("apigateway create-api-key --name old",),
        "apigateway update-api-key --api-key ${step1:id} --patch-operations "
        "op=replace,path=/name,value=new",
        "apigateway get-api-keys --query items[0].name",
        "new",
        (("--name old", "--name new"),),
    ),
    Update(
        (_PLAN,),
        "apigateway update-usage-plan --usage-plan-id ${step1:id} "
        "--patch-operations op=replace,path=/quota/limit,value=7",
        "apigateway get-usage-plans --query items[0].quota.limit",
        7,
        (("limit=5", "limit=7"),),
    ),
    Update(
        (
            _REST_API,
            _RESOURCES,
            "apigateway create-resource --rest-api-id ${step1:id} --parent-id ${step2:items[0].id} "
            "--path-part old",
        ),
        "apigateway update-resource --rest-api-id ${step1:id} --resource-id ${step3:id} "
        "--patch-operations op=replace,path=/pathPart,value=new",
        f"{_RESOURCES} --query items[?id=='${{step3:id}}'].[pathPart,path][]",
        ["new", "/new"],
        (("--path-part old", "--path-part new"),),
    ),
    Update(
        _METHOD,
        "apigateway update-method --rest-api-id ${step1:id} --resource-id ${step2:items[0].id} "
        "--http-method GET "
        "--patch-operations op=replace,path=/apiKeyRequired,value=true",
        "apigateway get-method --rest-api-id ${step1:id} --resource-id ${step2:items[0].id} "
        "--http-method GET "
        "--query apiKeyRequired",
        True,
        (("--authorization-type NONE", "--authorization-type NONE --api-key-required"),),
    ),
    Update(
        (_REST_API, "apigateway create-deployment --rest-api-id ${step1:id}"),
        "apigateway update-deployment --rest-api-id ${step1:id} --deployment-id ${step2:id} "
        "--patch-operations op=replace,path=/description,value=new",
        "apigateway get-deployments --rest-api-id ${step1:id} --query items[0].description",
        "new",
        (("create-deployment", "create-deployment --description new"),),
    ),
    Update(
        (_REST_API, _DEPLOYMENT),
        "apigateway update-stage --rest-api-id ${step1:id} --stage-name s "
        "--patch-operations op=replace,path=/variables/v,value=new",
        "apigateway get-stage --rest-api-id ${step1:id} --stage-name s --query variables.v",
        "new",
        (("--stage-name s", "--stage-name s --variables v=new"),),
    ),
    Update(
        (
            _HTTP_API,
            "apigatewayv2 create-authorizer --api-id ${step1:ApiId} --name old --authorizer-type "
            "JWT "
            "--identity-source '$request.header.Authorization' --jwt-configuration "
            "Issuer=https://i,Audience=old",
        ),
        "apigatewayv2 update-authorizer --api-id ${step1:ApiId} --authorizer-id "
        "${step2:AuthorizerId} "
        "--jwt-configuration Issuer=https://i,Audience=new",
        "apigatewayv2 get-authorizers --api-id ${step1:ApiId} --query "
        "Items[].JwtConfiguration.Audience[]",
        ["new"],
        (("Audience=old", "Audience=new"),),
    ),
    Update(
        (_HTTP_API, "apigatewayv2 create-route --api-id ${step1:ApiId} --route-key 'GET /old'"),
        "apigatewayv2 update-route --api-id ${step1:ApiId} --route-id ${step2:RouteId} --route-key "
        "'GET /new'",
        "apigatewayv2 get-routes --api-id ${step1:ApiId} --query Items[].RouteKey",
        ["GET /new"],
        (("GET /old", "GET /new"),),
    ),
    Update(
        (_HTTP_API, "apigatewayv2 create-stage --api-id ${step1:ApiId} --stage-name s"),
        "apigatewayv2 update-stage --api-id ${step1:ApiId} --stage-name s --auto-deploy",
        "apigatewayv2 get-stages --api-id ${step1:ApiId} --query Items[].AutoDeploy",
        [True],
        (("--stage-name s", "--stage-name s --auto-deploy"),),
    ),
    Update(
        (_CONFIGURATION, _GROUP),
        "autoscaling set-desired-capacity --auto-scaling-group-name g --desired-capacity 1",
        "autoscaling describe-auto-scaling-groups --query "
        "AutoScalingGroups[].[DesiredCapacity,length(Instances)][]",
        [1, 1],
        (("--min-size 0", "--min-size 0 --desired-capacity 1"),),
    ),
    Update(
        (
            "backup create-backup-vault --backup-vault-name v",
            f"backup create-backup-plan --backup-plan '{_PLAN_OF_BACKUPS.format('p', 0)}'",
        ),
        "backup update-backup-plan --backup-plan-id ${step2:BackupPlanId} "
        f"--backup-plan '{_PLAN_OF_BACKUPS.format('p', 30)}'",
        "backup get-backup-plan --backup-plan-id ${step2:BackupPlanId} --query "
        "BackupPlan.Rules[0].ScheduleExpression",
        "cron(30 5 ? * * *)",
        (("cron(0", "cron(30"),),
    ),
    Update(
        (
            "cloudformation create-stack --stack-name s --template-body "
            '\'{"Resources":{"T":{"Type":"AWS::SNS::Topic","Properties":{"TopicName":"t"}}}}\'',
            "cloudformation wait stack-create-complete --stack-name s",
        ),
        "cloudformation update-termination-protection --stack-name s "
        "--enable-termination-protection",
        "cloudformation describe-stacks --stack-name s --query "
        "Stacks[0].EnableTerminationProtection",
        True,
        (("create-stack", "create-stack --enable-termination-protection"),),
    ),
    Update(
        (_PROJECT,),
        "codebuild update-project --name project --timeout-in-minutes 7",
        "codebuild batch-get-projects --names project --query "
        "projects[0].[timeoutInMinutes,source.buildspec]",
        [7, "b"],
        (("--name project", "--name project --timeout-in-minutes 7"),),
    ),
    Update(
        (_POOL, _CLIENT),
        "cognito-idp update-user-pool-client --user-pool-id ${step1:UserPool.Id} "
        "--client-id ${step2:UserPoolClient.ClientId} --client-name c --access-token-validity 7",
        "cognito-idp describe-user-pool-client --user-pool-id ${step1:UserPool.Id} "
        "--client-id ${step2:UserPoolClient.ClientId} --query "
        "UserPoolClient.[ClientName,AccessTokenValidity]",
        ["c", 7],
        (("--client-name c", "--client-name c --access-token-validity 7"),),
    ),
    Update(
        (_POOL, _USER),
        "cognito-idp admin-update-user-attributes --user-pool-id ${step1:UserPool.Id} --username u "
        "--user-attributes Name=email,Value=new@example.com",
        "cognito-idp admin-get-user --user-pool-id ${step1:UserPool.Id} --username u "
        "--query UserAttributes[?Name=='email'].Value",
        ["new@example.com"],
        (("old@example", "new@example"),),
    ),
    Update(
        (_POOL, _USER),
        "cognito-idp admin-set-user-password --user-pool-id ${step1:UserPool.Id} --username u "
        "--password Passw0rd! "
        "--permanent",
        "cognito-idp admin-get-user --user-pool-id ${step1:UserPool.Id} --username u --query "
        "UserStatus",
        "CONFIRMED",
    ),
    Update(
        (_POOL,),
        "cognito-idp set-user-pool-mfa-config --user-pool-id ${step1:UserPool.Id} "
        "--mfa-configuration OPTIONAL "
        "--software-token-mfa-configuration Enabled=true",
        "cognito-idp describe-user-pool --user-pool-id ${step1:UserPool.Id} --query "
        "UserPool.MfaConfiguration",
        "OPTIONAL",
    ),
    Update(
        (_TEMPLATE, _VERSION),
        "ec2 modify-launch-template --launch-template-name template --default-version 2",
        "ec2 describe-launch-templates --query "
        "LaunchTemplates[].[DefaultVersionNumber,LatestVersionNumber][]",
        [2, 2],
    ),
    Update(
        (_TEMPLATE,),
        _VERSION,
        "ec2 describe-launch-template-versions --launch-template-name template --versions 2 "
        "--query LaunchTemplateVersions[].LaunchTemplateData.InstanceType",
        ["t3.micro"],
    ),
    Update(
        (_TEMPLATE, _VERSION),
        "ec2 delete-launch-template-versions --launch-template-name template --versions 2",
        "ec2 describe-launch-template-versions --launch-template-name template "
        "--query LaunchTemplateVersions[].VersionNumber",
        [1],
        ((_VERSION, "ec2 describe-launch-templates"),),
    ),
    Update(
        ("ec2 create-volume --availability-zone us-east-1a --size 1",),
        "ec2 modify-volume --volume-id ${step1:VolumeId} --size 2 --volume-type gp3",
        "ec2 describe-volumes --query Volumes[].[Size,VolumeType][]",
        [2, "gp3"],
        (("--size 1", "--size 2 --volume-type gp3"),),
    ),
    Update(
        _NETWORK,
        "ec2 modify-subnet-attribute --subnet-id ${step2:Subnet.SubnetId} "
        "--map-public-ip-on-launch",
        "ec2 describe-subnets --subnet-ids ${step2:Subnet.SubnetId} --query "
        "Subnets[].MapPublicIpOnLaunch",
        [True],
    ),
    Update(
        (
            *_NETWORK,
            "ec2 authorize-security-group-ingress --group-id ${step4:GroupId} --protocol tcp "
            "--port 22 "
            "--cidr 10.0.0.0/8",
        ),
        "ec2 modify-security-group-rules --group-id ${step4:GroupId} --security-group-rules "
        "'SecurityGroupRuleId=${step5:SecurityGroupRules[0].SecurityGroupRuleId},"
        "SecurityGroupRule={IpProtocol=tcp,FromPort=23,ToPort=23,CidrIpv4=10.1.0.0/16}'",
        "ec2 describe-security-groups --group-ids ${step4:GroupId} --query "
        "SecurityGroups[].IpPermissions[]."
        "[FromPort,IpRanges[0].CidrIp][]",
        [23, "10.1.0.0/16"],
        (
            ("--port 22", "--port 23"),
            ("10.0.0.0/8", "10.1.0.0/16"),
        ),
    ),
    Update(
        (
            *_NETWORK,
            "ec2 create-internet-gateway",
            "ec2 create-internet-gateway",
            "ec2 attach-internet-gateway --vpc-id ${step1:Vpc.VpcId} "
            "--internet-gateway-id ${step5:InternetGateway.InternetGatewayId}",
            "ec2 create-route-table --vpc-id ${step1:Vpc.VpcId}",
            "ec2 create-route --route-table-id ${step8:RouteTable.RouteTableId} "
            "--destination-cidr-block 0.0.0.0/0 "
            "--gateway-id ${step5:InternetGateway.InternetGatewayId}",
        ),
        "ec2 replace-route --route-table-id ${step8:RouteTable.RouteTableId} "
        "--destination-cidr-block 0.0.0.0/0 "
        "--gateway-id ${step6:InternetGateway.InternetGatewayId}",
        "ec2 describe-route-tables --route-table-ids ${step8:RouteTable.RouteTableId} "
        "--query "
        "length(RouteTables[].Routes[?GatewayId=='${step6:InternetGateway.InternetGatewayId}'][])",
        1,
        (("--gateway-id ${step5", "--gateway-id ${step6"),),
    ),
    Update(
        (
            *_NETWORK,
            "ec2 create-route-table --vpc-id ${step1:Vpc.VpcId}",
            "ec2 create-route-table --vpc-id ${step1:Vpc.VpcId}",
            *_GATEWAY,
            "ec2 create-route --route-table-id ${step6:RouteTable.RouteTableId} "
            "--destination-cidr-block 0.0.0.0/0 "
            "--gateway-id ${step7:InternetGateway.InternetGatewayId}",
            "ec2 associate-route-table --route-table-id ${step5:RouteTable.RouteTableId} "
            "--subnet-id ${step2:Subnet.SubnetId}",
        ),
        "ec2 replace-route-table-association --association-id ${step10:AssociationId} "
        "--route-table-id ${step6:RouteTable.RouteTableId}",
        "ec2 describe-route-tables --route-table-ids ${step5:RouteTable.RouteTableId} "
        "${step6:RouteTable.RouteTableId} --query RouteTables[].length(Associations)",
        [0, 1],
        (("--route-table-id ${step5", "--route-table-id ${step6"),),
    ),
    Update(
        ("ecs create-cluster --cluster-name c",),
        "ecs update-cluster --cluster c --settings name=containerInsights,value=enabled",
        "ecs describe-clusters --clusters c --include SETTINGS --query clusters[].settings[].value",
        ["enabled"],
        (("--cluster-name c", "--cluster-name c --settings name=containerInsights,value=enabled"),),
    ),
    Update(
        ("ecs create-cluster --cluster-name c",),
        "ecs update-cluster-settings --cluster c --settings name=containerInsights,value=enabled",
        "ecs describe-clusters --clusters c --include SETTINGS --query clusters[].settings[].value",
        ["enabled"],
        (("--cluster-name c", "--cluster-name c --settings name=containerInsights,value=enabled"),),
    ),
    Update(
        ("ecs create-cluster --cluster-name c",),
        "ecs put-cluster-capacity-providers --cluster c --capacity-providers FARGATE "
        "--default-capacity-provider-strategy capacityProvider=FARGATE,weight=1",
        "ecs describe-clusters --clusters c --query clusters[].capacityProviders[]",
        ["FARGATE"],
        (
            (
                "--cluster-name c",
                "--cluster-name c --capacity-providers FARGATE "
                "--default-capacity-provider-strategy "
                "capacityProvider=FARGATE,weight=1",
            ),
        ),
    ),
    Update(
        ("efs create-file-system --creation-token t",),
        "efs update-file-system --file-system-id ${step1:FileSystemId} --throughput-mode elastic",
        "efs describe-file-systems --query FileSystems[].ThroughputMode",
        ["elastic"],
        (("--creation-token t", "--creation-token t --throughput-mode elastic"),),
    ),
    Update(
        ("efs create-file-system --creation-token t",),
        "efs update-file-system-protection --file-system-id ${step1:FileSystemId} "
        "--replication-overwrite-protection DISABLED",
        "efs describe-file-systems --query "
        "FileSystems[].FileSystemProtection.ReplicationOverwriteProtection",
        ["DISABLED"],
    ),
    Update(
        (f"{_CACHE} --num-cache-nodes 1",),
        "elasticache modify-cache-cluster --cache-cluster-id c --cache-node-type cache.t3.small "
        "--apply-immediately",
        "elasticache describe-cache-clusters --query CacheClusters[].CacheNodeType",
        ["cache.t3.small"],
        (("cache.t3.micro", "cache.t3.small"),),
    ),
    Update(
        (
            *_NETWORK,
            "elasticache create-cache-subnet-group --cache-subnet-group-name g "
            "--cache-subnet-group-description d "
            "--subnet-ids ${step2:Subnet.SubnetId}",
        ),
        "elasticache modify-cache-subnet-group --cache-subnet-group-name g "
        "--cache-subnet-group-description new "
        "--subnet-ids ${step3:Subnet.SubnetId}",
        "elasticache describe-cache-subnet-groups --cache-subnet-group-name g --query "
        "CacheSubnetGroups[]."
        "[CacheSubnetGroupDescription,Subnets[0].SubnetIdentifier=='${step3:Subnet.SubnetId}'][]",
        ["new", True],
        (
            ("description d", "description new"),
            ("--subnet-ids ${step2", "--subnet-ids ${step3"),
        ),
    ),
    Update(
        (
            *_BALANCER,
            f"elbv2 create-listener --load-balancer-arn {_ARN} --protocol HTTP --port 80 "
            f"--default-actions Type=forward,TargetGroupArn={_TARGETS}",
        ),
        "elbv2 modify-listener --listener-arn ${step8:Listeners[0].ListenerArn} --port 81 "
        f"--default-actions Type=forward,TargetGroupArn={_OTHERS}",
        f"elbv2 describe-listeners --load-balancer-arn {_ARN} --query "
        f"Listeners[].[Port,DefaultActions[0].TargetGroupArn=='{_OTHERS}'][]",
        [81, True],
        (
            ("--port 80 --default", "--port 81 --default"),
            ("TargetGroupArn=${step6", "TargetGroupArn=${step7"),
        ),
    ),
    Update(
        _BALANCER,
        f"elbv2 modify-target-group --target-group-arn {_TARGETS} --health-check-path /new",
        f"elbv2 describe-target-groups --target-group-arns {_TARGETS} --query "
        f"TargetGroups[].HealthCheckPath",
        ["/new"],
        (("--name one", "--name one --health-check-path /new"),),
    ),
    Update(
        _BALANCER,
        f"elbv2 set-security-groups --load-balancer-arn {_ARN} --security-groups "
        f"${{step4:GroupId}}",
        "elbv2 describe-load-balancers --query "
        "LoadBalancers[0].SecurityGroups==['${step4:GroupId}']",
        True,
        (("--name b ", "--name b --security-groups ${step4:GroupId} "),),
    ),
    Update(
        (
            *_BALANCER[:5],
            "ec2 create-subnet --vpc-id ${step1:Vpc.VpcId} --cidr-block 10.0.3.0/24 "
            "--availability-zone us-east-1c",
        ),
        f"elbv2 set-subnets --load-balancer-arn {_ARN} --subnets ${{step2:Subnet.SubnetId}} "
        f"${{step6:Subnet.SubnetId}}",
        "elbv2 describe-load-balancers --query LoadBalancers[0].AvailabilityZones[].SubnetId==["
        "'${step2:Subnet.SubnetId}','${step6:Subnet.SubnetId}']",
        True,
    ),
    Update(
        _BALANCER,
        f"elbv2 set-ip-address-type --load-balancer-arn {_ARN} --ip-address-type dualstack",
        "elbv2 describe-load-balancers --query LoadBalancers[0].IpAddressType",
        "dualstack",
        (("--name b ", "--name b --ip-address-type dualstack "),),
    ),
    Update(
        ("events create-event-bus --name b",),
        "events update-event-bus --name b --description new",
        "events describe-event-bus --name b --query Description",
        "new",
        (("--name b", "--name b --description new"),),
    ),
    Update(
        (
            "s3api create-bucket --bucket bucket",
            _STREAM,
            "firehose describe-delivery-stream --delivery-stream-name d",
        ),
        "firehose update-destination --delivery-stream-name d --current-delivery-stream-version-id "
        "${step3:DeliveryStreamDescription.VersionId} --destination-id "
        "${step3:DeliveryStreamDescription.Destinations[0].DestinationId} "
        "--extended-s3-destination-update Prefix=new/",
        "firehose describe-delivery-stream --delivery-stream-name d --query "
        "DeliveryStreamDescription."
        "Destinations[].ExtendedS3DestinationDescription.[Prefix,BucketARN][]",
        ["new/", "arn:aws:s3:::bucket"],
        (("Prefix=old/", "Prefix=new/"),),
    ),
    Update(
        ("s3api create-bucket --bucket bucket", _STREAM),
        "firehose start-delivery-stream-encryption --delivery-stream-name d",
        "firehose describe-delivery-stream --delivery-stream-name d --query "
        "DeliveryStreamDescription."
        "DeliveryStreamEncryptionConfiguration.Status",
        "ENABLED",
        (
            (
                "-name d",
                "-name d --delivery-stream-encryption-configuration-input KeyType=AWS_OWNED_CMK",
            ),
        ),
    ),
    Update(
        ("glue create-database --database-input Name=d",),
        "glue update-database --name d --database-input Name=d,Description=new",
        "glue get-database --name d --query Database.Description",
        "new",
        (("Name=d", "Name=d,Description=new"),),
    ),
    Update(
        ("glue create-database --database-input Name=d", _TABLE),
        "glue update-table --database-name d --table-input Name=t,Description=new",
        "glue get-table --database-name d --name t --query Table.Description",
        "new",
        (("Name=t,", "Name=t,Description=new,"),),
    ),
    Update(
        (
            f"glue create-job --name j --role {ROLE} --command "
            f"Name=glueetl,ScriptLocation=s3://b/old",
        ),
        f"glue update-job --job-name j --job-update "
        f"'Role={ROLE},Command={{Name=glueetl,ScriptLocation=s3://b/new}}'",
        "glue get-job --job-name j --query Job.Command.ScriptLocation",
        "s3://b/new",
        (("s3://b/old", "s3://b/new"),),
    ),
    Update(
        (
            "glue create-database --database-input Name=d",
            f"glue create-crawler --name c --role {ROLE} --database-name d --targets "
            f"S3Targets=[{{Path=s3://b/old}}]",
        ),
        "glue update-crawler --name c --targets S3Targets=[{Path=s3://b/new}]",
        "glue get-crawler --name c --query Crawler.[Targets.S3Targets[0].Path,DatabaseName]",
        ["s3://b/new", "d"],
        (("s3://b/old", "s3://b/new"),),
    ),
    Update(
        (_ROLE,),
        "iam update-role-description --role-name r --description new",
        "iam get-role --role-name r --query Role.Description",
        "new",
        (("--role-name r", "--role-name r --description new"),),
    ),
    Update(
        (_ROLE,),
        "iam put-role-permissions-boundary --role-name r --permissions-boundary "
        "arn:aws:iam::aws:policy/ReadOnlyAccess",
        "iam get-role --role-name r --query Role.PermissionsBoundary.PermissionsBoundaryArn",
        "arn:aws:iam::aws:policy/ReadOnlyAccess",
        (
            (
                "--role-name r",
                "--role-name r --permissions-boundary arn:aws:iam::aws:policy/ReadOnlyAccess",
            ),
        ),
    ),
    Update(
        (
            _ROLE,
            "iam put-role-permissions-boundary --role-name r --permissions-boundary "
            "arn:aws:iam::aws:policy/ReadOnlyAccess",
        ),
        "iam delete-role-permissions-boundary --role-name r",
        "iam get-role --role-name r --query Role.PermissionsBoundary",
        None,
        (
            (
                "iam put-role-permissions-boundary --role-name r --permissions-boundary "
                "arn:aws:iam::aws:policy/ReadOnlyAccess",
                "iam list-roles",
            ),
        ),
    ),
    Update(
        ("iam create-user --user-name u",),
        "iam put-user-permissions-boundary --user-name u --permissions-boundary "
        "arn:aws:iam::aws:policy/ReadOnlyAccess",
        "iam get-user --user-name u --query User.PermissionsBoundary.PermissionsBoundaryArn",
        "arn:aws:iam::aws:policy/ReadOnlyAccess",
        (
            (
                "--user-name u",
                "--user-name u --permissions-boundary arn:aws:iam::aws:policy/ReadOnlyAccess",
            ),
        ),
    ),
    Update(
        (
            "iam create-user --user-name u",
            "iam put-user-permissions-boundary --user-name u --permissions-boundary "
            "arn:aws:iam::aws:policy/ReadOnlyAccess",
        ),
        "iam delete-user-permissions-boundary --user-name u",
        "iam get-user --user-name u --query User.PermissionsBoundary",
        None,
        (
            (
                "iam put-user-permissions-boundary --user-name u --permissions-boundary "
                "arn:aws:iam::aws:policy/ReadOnlyAccess",
                "iam list-users",
            ),
        ),
    ),
    Update(
        (
            "iam create-user --user-name u",
            "iam create-login-profile --user-name u --password Passw0rd!",
        ),
        "iam update-login-profile --user-name u --password-reset-required",
        "iam get-login-profile --user-name u --query LoginProfile.PasswordResetRequired",
        True,
        (("--password Passw0rd!", "--password Passw0rd! --password-reset-required"),),
    ),
    Update(
        ("kinesis create-stream --stream-name s --shard-count 1",),
        "kinesis start-stream-encryption --stream-name s --encryption-type KMS --key-id "
        "alias/aws/kinesis",
        "kinesis describe-stream-summary --stream-name s --query "
        "StreamDescriptionSummary.[EncryptionType,KeyId]",
        ["KMS", "alias/aws/kinesis"],
    ),
    Update(
        (
            "kinesis create-stream --stream-name s --shard-count 1",
            "kinesis start-stream-encryption --stream-name s --encryption-type KMS --key-id "
            "alias/aws/kinesis",
        ),
        "kinesis stop-stream-encryption --stream-name s --encryption-type KMS --key-id "
        "alias/aws/kinesis",
        "kinesis describe-stream-summary --stream-name s --query "
        "StreamDescriptionSummary.EncryptionType",
        "NONE",
        (
            (
                "kinesis start-stream-encryption --stream-name s --encryption-type KMS --key-id "
                "alias/aws/kinesis",
                "kinesis list-streams",
            ),
        ),
    ),
    Update(
        (
            _FUNCTION,
            "lambda publish-version --function-name f",
            "lambda create-alias --function-name f --name live --function-version '$LATEST' "
            "--description old",
        ),
        "lambda update-alias --function-name f --name live --function-version 1 "
        "--routing-config AdditionalVersionWeights={}",
        "lambda get-alias --function-name f --name live --query [FunctionVersion,Description]",
        ["1", "old"],
        (("'$LATEST'", "1"),),
    ),
    Update(
        (_FUNCTION, _QUEUE, _MAPPING),
        "lambda update-event-source-mapping --uuid ${step3:UUID} --batch-size 5 --no-enabled",
        "lambda get-event-source-mapping --uuid ${step3:UUID} --query [BatchSize,State]",
        [5, "Disabled"],
        (("--batch-size 1", "--batch-size 5 --no-enabled"),),
    ),
    Update(
        (_FUNCTION,),
        "lambda update-function-code --function-name f --image-uri "
        "000000000000.dkr.ecr.us-east-1.amazonaws.com/f:2",
        "lambda get-function --function-name f --query Code.ImageUri",
        "000000000000.dkr.ecr.us-east-1.amazonaws.com/f:2",
        (("amazonaws.com/f:1", "amazonaws.com/f:2"),),
    ),
    Update(
        ("opensearch create-domain --domain-name dom",),
        "opensearch update-domain-config --domain-name dom --cluster-config "
        "InstanceType=t3.small.search,InstanceCount=2",
        "opensearch describe-domain --domain-name dom --query "
        "DomainStatus.ClusterConfig.[InstanceType,InstanceCount]",
        ["t3.small.search", 2],
        (
            (
                "--domain-name dom",
                "--domain-name dom --cluster-config InstanceType=t3.small.search,InstanceCount=2",
            ),
        ),
    ),
    Update(
        (
            *_NETWORK,
            "rds create-db-subnet-group --db-subnet-group-name g --db-subnet-group-description d "
            "--subnet-ids ${step2:Subnet.SubnetId}",
        ),
        "rds modify-db-subnet-group --db-subnet-group-name g --db-subnet-group-description new "
        "--subnet-ids "
        "${step3:Subnet.SubnetId}",
        "rds describe-db-subnet-groups --db-subnet-group-name g --query DBSubnetGroups[]."
        "[DBSubnetGroupDescription,Subnets[0].SubnetIdentifier=='${step3:Subnet.SubnetId}'][]",
        ["new", True],
        (
            ("description d", "description new"),
            ("--subnet-ids ${step2", "--subnet-ids ${step3"),
        ),
    ),
    Update(
        (
            "route53 create-health-check --caller-reference c --health-check-config "
            "Type=HTTP,FullyQualifiedDomainName=a.example.com,Port=80",
        ),
        "route53 update-health-check --health-check-id ${step1:HealthCheck.Id} --port 81 "
        "--resource-path /new",
        "route53 get-health-check --health-check-id ${step1:HealthCheck.Id} --query "
        "HealthCheck.HealthCheckConfig.[Port,ResourcePath,FullyQualifiedDomainName]",
        [81, "/new", "a.example.com"],
        (("Port=80", "Port=81,ResourcePath=/new"),),
    ),
    Update(
        ("route53 create-hosted-zone --name example.com --caller-reference c",),
        "route53 update-hosted-zone-comment --id ${step1:HostedZone.Id} --comment new",
        "route53 get-hosted-zone --id ${step1:HostedZone.Id} --query HostedZone.Config.Comment",
        "new",
        (("--caller-reference c", "--caller-reference c --hosted-zone-config Comment=new"),),
    ),
    Update(
        ("ses create-template --template TemplateName=t,SubjectPart=old",),
        "ses update-template --template TemplateName=t,SubjectPart=new",
        "ses get-template --template-name t --query Template.SubjectPart",
        "new",
        (("SubjectPart=old", "SubjectPart=new"),),
    ),
    Update(
        ("sns create-topic --name t",),
        "sns add-permission --topic-arn ${step1:TopicArn} --label mine --aws-account-id "
        "111111111111 "
        "--action-name Publish",
        "sns get-topic-attributes --topic-arn ${step1:TopicArn} --query "
        "contains(Attributes.Policy,'mine')",
        True,
    ),
    Update(
        (
            "sns create-topic --name t",
            "sns add-permission --topic-arn ${step1:TopicArn} --label mine --aws-account-id "
            "111111111111 "
            "--action-name Publish",
        ),
        "sns remove-permission --topic-arn ${step1:TopicArn} --label mine",
        "sns get-topic-attributes --topic-arn ${step1:TopicArn} --query "
        "contains(Attributes.Policy,'mine')",
        False,
        (
            (
                "sns add-permission --topic-arn ${step1:TopicArn} --label mine --aws-account-id "
                "111111111111 "
                "--action-name Publish",
                "sns list-topics",
            ),
        ),
    ),
    Update(
        (
            "secretsmanager create-secret --name s --secret-string one",
            "secretsmanager put-secret-value --secret-id s --secret-string two",
        ),
        "secretsmanager update-secret-version-stage --secret-id s --version-stage AWSCURRENT "
        "--move-to-version-id ${step1:VersionId} --remove-from-version-id ${step2:VersionId}",
        "secretsmanager get-secret-value --secret-id s --query SecretString",
        "one",
    ),
    Update(
        (
            "wafv2 create-ip-set --name s --scope REGIONAL --ip-address-version IPV4 --addresses "
            "10.0.0.0/8",
        ),
        "wafv2 update-ip-set --name s --scope REGIONAL --id ${step1:Summary.Id} --addresses "
        "11.0.0.0/8 "
        "--lock-token ${step1:Summary.LockToken}",
        "wafv2 get-ip-set --name s --scope REGIONAL --id ${step1:Summary.Id} --query "
        "IPSet.Addresses",
        ["11.0.0.0/8"],
        (("10.0.0.0/8", "11.0.0.0/8"),),
    ),
    Update(
        ("ec2 create-volume --availability-zone us-east-1a --size 1", _MACHINE),
        "ec2 attach-volume --volume-id ${step1:VolumeId} --instance-id "
        "${step2:Instances[0].InstanceId} "
        "--device /dev/sdf",
        "ec2 describe-volumes --volume-ids ${step1:VolumeId} --query "
        "Volumes[].Attachments[].Device",
        ["/dev/sdf"],
    ),
    Update(
        (
            "ec2 create-volume --availability-zone us-east-1a --size 1",
            _MACHINE,
            "ec2 attach-volume --volume-id ${step1:VolumeId} --instance-id "
            "${step2:Instances[0].InstanceId} "
            "--device /dev/sdf",
        ),
        "ec2 detach-volume --volume-id ${step1:VolumeId}",
        "ec2 describe-volumes --volume-ids ${step1:VolumeId} --query "
        "Volumes[].[State,length(Attachments)][]",
        ["available", 0],
        (
            (
                "ec2 attach-volume --volume-id ${step1:VolumeId} --instance-id "
                "${step2:Instances[0].InstanceId} "
                "--device /dev/sdf",
                "ec2 describe-volumes",
            ),
        ),
    ),
    Update(
        ("ec2 allocate-address", _MACHINE),
        "ec2 associate-address --allocation-id ${step1:AllocationId} --instance-id "
        "${step2:Instances[0].InstanceId}",
        "ec2 describe-addresses --query "
        "Addresses[].InstanceId==['${step2:Instances[0].InstanceId}']",
        True,
    ),
    Update(
        (
            "ec2 allocate-address",
            _MACHINE,
            "ec2 associate-address --allocation-id ${step1:AllocationId} "
            "--instance-id ${step2:Instances[0].InstanceId}",
        ),
        "ec2 disassociate-address --association-id ${step3:AssociationId}",
        "ec2 describe-addresses --query Addresses[].AssociationId",
        [],
        (
            (
                "ec2 associate-address --allocation-id ${step1:AllocationId} "
                "--instance-id ${step2:Instances[0].InstanceId}",
                "ec2 describe-addresses",
            ),
        ),
    ),
    Update(
        ("efs create-file-system --creation-token t",),
        "efs put-backup-policy --file-system-id ${step1:FileSystemId} --backup-policy "
        "Status=ENABLED",
        "efs describe-backup-policy --file-system-id ${step1:FileSystemId} --query "
        "BackupPolicy.Status",
        "ENABLED",
    ),
    Update(
        (_CACHE_PARAMETERS,),
        f"elasticache modify-cache-parameter-group {_CACHE_PARAMETER}",
        "elasticache describe-cache-parameters --cache-parameter-group-name p --query "
        "Parameters[?ParameterName=='maxmemory-policy'].ParameterValue",
        ["allkeys-lru"],
    ),
    Update(
        (_CACHE_PARAMETERS, f"elasticache modify-cache-parameter-group {_CACHE_PARAMETER}"),
        "elasticache reset-cache-parameter-group --cache-parameter-group-name p "
        "--reset-all-parameters",
        "elasticache describe-cache-parameters --cache-parameter-group-name p --query "
        "Parameters[?ParameterName=='maxmemory-policy'].ParameterValue",
        ["volatile-lru"],
        (
            (
                f"elasticache modify-cache-parameter-group {_CACHE_PARAMETER}",
                "elasticache describe-cache-parameter-groups",
            ),
        ),
    ),
    Update(
        _BALANCER,
        f"elbv2 modify-load-balancer-attributes --load-balancer-arn {_ARN} "
        "--attributes Key=idle_timeout.timeout_seconds,Value=7",
        f"elbv2 describe-load-balancer-attributes --load-balancer-arn {_ARN} --query "
        "Attributes[?Key=='idle_timeout.timeout_seconds'].Value",
        ["7"],
    ),
    Update(
        _BALANCER,
        f"elbv2 modify-target-group-attributes --target-group-arn {_TARGETS} "
        "--attributes Key=deregistration_delay.timeout_seconds,Value=7",
        f"elbv2 describe-target-group-attributes --target-group-arn {_TARGETS} --query "
        "Attributes[?Key=='deregistration_delay.timeout_seconds'].Value",
        ["7"],
    ),
    Update(
        (
            "s3api create-bucket --bucket bucket",
            _STREAM,
            "firehose start-delivery-stream-encryption --delivery-stream-name d",
        ),
        "firehose stop-delivery-stream-encryption --delivery-stream-name d",
        "firehose describe-delivery-stream --delivery-stream-name d --query "
        "DeliveryStreamDescription."
        "DeliveryStreamEncryptionConfiguration.Status",
        "DISABLED",
        (
            (
                "firehose start-delivery-stream-encryption --delivery-stream-name d",
                "firehose list-delivery-streams",
            ),
        ),
    ),
    Update(
        (_FUNCTION, "lambda create-function-url-config --function-name f --auth-type NONE"),
        "lambda update-function-url-config --function-name f --auth-type AWS_IAM",
        "lambda get-function-url-config --function-name f --query AuthType",
        "AWS_IAM",
        (("--auth-type NONE", "--auth-type AWS_IAM"),),
    ),
    Update(
        (_FUNCTION, "lambda create-function-url-config --function-name f --auth-type AWS_IAM"),
        "lambda delete-function-url-config --function-name f",
        "lambda list-function-url-configs --function-name f --query FunctionUrlConfigs",
        [],
        (
            (
                "lambda create-function-url-config --function-name f --auth-type AWS_IAM",
                "lambda list-functions",
            ),
        ),
    ),
    Update(
        (
            _FUNCTION,
            "lambda put-function-event-invoke-config --function-name f --maximum-retry-attempts 1",
        ),
        "lambda put-function-event-invoke-config --function-name f --maximum-retry-attempts 0",
        "lambda get-function-event-invoke-config --function-name f --query MaximumRetryAttempts",
        0,
        (("--maximum-retry-attempts 1", "--maximum-retry-attempts 0"),),
    ),
    Update(
        (
            _FUNCTION,
            "lambda put-function-event-invoke-config --function-name f --maximum-retry-attempts 1",
        ),
        "lambda delete-function-event-invoke-config --function-name f",
        "lambda list-function-event-invoke-configs --function-name f --query "
        "FunctionEventInvokeConfigs",
        [],
        (
            (
                "lambda put-function-event-invoke-config --function-name f "
                "--maximum-retry-attempts 1",
                "lambda list-functions",
            ),
        ),
    ),
    Update(
        (_DATABASE_PARAMETERS,),
        f"rds modify-db-parameter-group {_DATABASE_PARAMETER}",
        "rds describe-db-parameters --db-parameter-group-name p --source user --query "
        "Parameters[].[ParameterName,ParameterValue][]",
        ["max_connections", "77"],
    ),
    Update(
        (_DATABASE_PARAMETERS, f"rds modify-db-parameter-group {_DATABASE_PARAMETER}"),
        "rds reset-db-parameter-group --db-parameter-group-name p --reset-all-parameters",
        "rds describe-db-parameters --db-parameter-group-name p --source user --query Parameters",
        [],
        (
            (
                f"rds modify-db-parameter-group {_DATABASE_PARAMETER}",
                "rds describe-db-parameter-groups",
            ),
        ),
    ),
)


@pytest.fixture
def aws(slot: Slot) -> Callable[[str], str]:
    """Run a command line in an empty account; returns its output. Fails where the command does."""
    slot.reset(1)

    def run(line: str) -> str:
        result = slot.executor.run(f"aws {line}")
        assert result.exit_code == 0, f"{line}: {' '.join(result.stderr.split())}"
        return result.stdout

    return run


@pytest.mark.sampled(15)
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.operation)
def test_an_update_is_shown(aws: Callable[[str], str], update: Update) -> None:
    """The service's own way to correct a setting was refused."""
    service, operation = update.operation.split()
    assert operation in ALLOWED[service]
    answers: list[str] = []
    for line in update.made:
        answers.append(aws(resolve(line, answers)))
    words, _, query = resolve(update.look, answers).partition(" --query ")
    look = f"{words} --query {shlex.quote(query)}"
    before = json.loads(aws(look) or "null")
    assert before != update.shown
    aws(resolve(update.line, answers))
    assert json.loads(aws(look) or "null") == update.shown


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "update", [one for one in UPDATES if one.instead], ids=lambda update: update.operation
)
def test_what_is_corrected_is_as_if_made_right(
    slot: Slot, aws: Callable[[str], str], update: Update
) -> None:
    """The judge of an account tells neither way from the other."""
    empty = take_snapshot(slot)
    right = list(update.made)
    for old, new in update.instead:
        right = [line.replace(old, new) for line in right]
    assert tuple(right) != update.made
    accounts = []
    for lines in (right, update.made, (*update.made, update.line)):
        slot.reset(1)
        answers: list[str] = []
        for line in lines:
            answers.append(aws(resolve(line, answers)))
        accounts.append(take_snapshot(slot))
    made_right, uncorrected, corrected = accounts
    judge = EpisodeComparison(empty, Goal(Target(empty, (made_right,)), Freedom()))
    assert not judge.judge(uncorrected).achieved
    verdict = judge.judge(corrected)
    assert verdict.achieved, verdict.describe()


@pytest.mark.parametrize(
    "update", [one for one in UPDATES if "${" not in one.line], ids=lambda update: update.operation
)
def test_what_is_not_there_is_not_updated(slot: Slot, update: Update) -> None:
    slot.reset(1)
    result = slot.executor.run(f"aws {update.line}")
    assert result.exit_code != 0 and "An error occurred (" in result.stderr


@pytest.mark.parametrize(
    ("made", "line", "code"),
    [
        (
            (_CONFIGURATION, _GROUP),
            "autoscaling set-desired-capacity --auto-scaling-group-name g --desired-capacity 3",
            "ValidationError",
        ),
        (
            (_TEMPLATE,),
            "ec2 create-launch-template-version --launch-template-name template --source-version 9 "
            "--launch-template-data InstanceType=t3.micro",
            "InvalidLaunchTemplateId.VersionNotFound",
        ),
        (
            (f"{_CACHE} --num-cache-nodes 1",),
            "elasticache modify-cache-cluster --cache-cluster-id c --cache-parameter-group-name "
            "nothing",
            "CacheParameterGroupNotFound",
        ),
        (
            _BALANCER,
            f"elbv2 set-subnets --load-balancer-arn {_ARN} --subnets subnet-0",
            "SubnetNotFound",
        ),
        (
            ("s3api create-bucket --bucket bucket", _STREAM),
            "firehose update-destination --delivery-stream-name d "
            "--current-delivery-stream-version-id 1 "
            "--destination-id destinationId-000000000001 "
            "--extended-s3-destination-update BucketARN=arn:aws:s3:::nothing",
            "InvalidArgumentException",
        ),
        (
            (_ROLE,),
            "iam put-role-permissions-boundary --role-name r "
            "--permissions-boundary arn:aws:iam::000000000000:policy/nothing",
            "NoSuchEntity",
        ),
        (
            (
                _FUNCTION,
                "lambda create-alias --function-name f --name live --function-version '$LATEST'",
            ),
            "lambda update-alias --function-name f --name live --function-version 9",
            "ResourceNotFoundException",
        ),
        (
            (_FUNCTION, _QUEUE, _MAPPING),
            "lambda update-event-source-mapping --uuid ${step3:UUID} --function-name nothing",
            "ResourceNotFoundException",
        ),
    ],
)
def test_an_update_to_what_is_not_there_is_refused(
    slot: Slot, aws: Callable[[str], str], made: tuple[str, ...], line: str, code: str
) -> None:
    answers: list[str] = []
    for one in made:
        answers.append(aws(resolve(one, answers)))
    before = take_snapshot(slot)
    result = slot.executor.run(f"aws {resolve(line, answers)}")
    assert result.exit_code != 0 and f"({code})" in result.stderr
    assert take_snapshot(slot).resources == before.resources


def test_versions_of_a_launch_template_come_and_go(aws: Callable[[str], str]) -> None:
    """MiniStack could not delete them, and took a source that it was given by a word for none."""
    aws(_TEMPLATE)
    new = (
        "ec2 create-launch-template-version --launch-template-name template --launch-template-data "
        "KeyName=k"
    )
    for source in ("'$Latest'", "'$Default'"):
        data = json.loads(aws(f"{new} --source-version {source}"))["LaunchTemplateVersion"][
            "LaunchTemplateData"
        ]
        assert data == {"InstanceType": "t3.nano", "KeyName": "k"}
    gone = json.loads(
        aws(
            "ec2 delete-launch-template-versions --launch-template-name template --versions 1 3 9 "
            "--output json"
        )
    )
    deleted = [one["VersionNumber"] for one in gone["SuccessfullyDeletedLaunchTemplateVersions"]]
    kept = {
        one["VersionNumber"]: one["ResponseError"]["Code"]
        for one in gone["UnsuccessfullyDeletedLaunchTemplateVersions"]
    }
    assert deleted == [3] and kept == {1: "unexpectedError", 9: "launchTemplateVersionDoesNotExist"}
    look = "ec2 describe-launch-templates --query LaunchTemplates[].LatestVersionNumber"
    assert json.loads(aws(look)) == [2]


def test_listeners_end_with_their_balancer_and_groups_know_theirs(
    slot: Slot, aws: Callable[[str], str]
) -> None:
    """A target group of a deleted listener went on to say that a balancer uses it, and the listener
    stayed."""
    answers: list[str] = []
    listener = (
        f"elbv2 create-listener --load-balancer-arn {_ARN} --protocol HTTP --port 80 "
        f"--default-actions Type=forward,TargetGroupArn={_TARGETS}"
    )
    for line in (*_BALANCER, listener):
        answers.append(aws(resolve(line, answers)))
    look = (
        "elbv2 describe-target-groups --names one --query length(TargetGroups[0].LoadBalancerArns)"
    )
    assert json.loads(aws(look)) == 1
    assert any(key[1] == "listeners" for key in take_snapshot(slot).resources)
    aws(resolve(f"elbv2 delete-load-balancer --load-balancer-arn {_ARN}", answers))
    assert json.loads(aws(look)) == 0
    assert not any(key[1] in ("listeners", "rules") for key in take_snapshot(slot).resources)
