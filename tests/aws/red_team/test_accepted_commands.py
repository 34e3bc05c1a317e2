"""Spellings that models use and that do no harm: they are accepted and do what they say, within
bounds."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name

from realhf.aws.cli.policy import check_command
from realhf.aws.grading.snapshot import take_snapshot
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.captures import resolve

pytestmark = pytest.mark.sim


def test_options_of_the_second_version_change_nothing(slot: Slot) -> None:
    plain = slot.executor.run("aws s3api list-buckets")
    for command in (
        "aws --no-cli-pager s3api list-buckets",
        "aws s3api list-buckets --no-cli-pager",
        "aws --cli-binary-format raw-in-base64-out s3api list-buckets --no-cli-auto-prompt",
    ):
        result = slot.executor.run(command)
        assert result.success and result.stdout == plain.stdout, result.stderr


def test_waiters_ask_the_simulator(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "ready"})
    waited = slot.executor.run("aws s3api wait bucket-exists --bucket ready")
    assert waited.success and not waited.stdout
    assert [request.operation for request in waited.requests] == ["HeadBucket"]
    for _ in range(2):  # its parsers are kept: the second time as the first
        assert slot.executor.run("aws dynamodb wait table-not-exists --table-name none").success
    wrong = slot.executor.run("aws dynamodb wait table-exists --tabel-name none")
    assert not wrong.success and not wrong.requests and wrong.refusal is None


def test_a_waiter_gives_up_in_time(slot: Slot) -> None:
    started = time.monotonic()
    waited = slot.executor.run("aws s3api wait bucket-exists --bucket none-such")
    assert not waited.success and not waited.timed_out and not waited.stopped
    assert "Max attempts exceeded" in waited.stderr
    assert 2 <= len(waited.requests) <= 20 and time.monotonic() - started < 9
    assert slot.executor.run("aws s3 ls").success


def test_files_of_the_working_folder_by_their_usual_names(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.files.put("in.txt", b"words")
    for command in (
        "aws s3 cp ./in.txt s3://box/a/in.txt",
        "aws s3api put-object --bucket box --key b.txt --body ./in.txt",
        "aws ssm put-parameter --name p --type String --value file://./in.txt",
        "aws s3 cp s3://box/b.txt .",
        "aws s3 cp s3://box/a/ ./below/ --recursive",
        "aws s3api get-object --bucket box --key b.txt ./c.txt",
        "aws s3 cp . s3://box/all/ --recursive",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    for name in ("b.txt", "c.txt", "below/in.txt"):
        assert (slot.files.path / name).read_bytes() == b"words", name
    assert slot.state.call("ssm", "GetParameter", {"Name": "p"})["Parameter"]["Value"] == "words"
    keys = {
        found["Key"]
        for found in slot.state.call("s3", "ListObjectsV2", {"Bucket": "box"})["Contents"]
    }
    assert {"a/in.txt", "b.txt", "all/in.txt", "all/below/in.txt"} <= keys


def test_urls_and_underscores_are_texts_like_any_other(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.files.put("in.txt", b"words")
    url = "https://example.com/hook?a=b"
    for command in (
        f"aws ssm put-parameter --name p --type String --value {url}",
        f"aws sqs create-queue --queue-name q --tags home={url}",
        "aws s3api put-object --bucket box --key _next/static.js --body in.txt",
        "aws s3 cp in.txt s3://box/_headers",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    assert slot.state.call("ssm", "GetParameter", {"Name": "p"})["Parameter"]["Value"] == url
    keys = [
        found["Key"]
        for found in slot.state.call("s3", "ListObjectsV2", {"Bucket": "box"})["Contents"]
    ]
    assert keys == ["_headers", "_next/static.js"]


def test_the_cli_sends_what_the_policy_read(slot: Slot) -> None:
    """However global options stand around them, service and operation are those that the CLI
    finds."""
    draw = random.Random(8)
    globals_ = (
        "--region us-east-1",
        "--output json",
        "--output=text",
        "--query Buckets",
        "--query list-queues",
        "--no-paginate",
        "--no-cli-pager",
        "--reg=us-east-1",
        "--quer Names",
        "-x",
        "-1",
        "--unknown",
        "-",
    )
    operations = (
        ("s3api", "list-buckets"),
        ("sqs", "list-queues"),
        ("iam", "list-users"),
        ("dynamodb", "list-tables"),
    )
    names = {"s3api": "s3"}
    sent = 0
    for _ in range(150):
        words = list(draw.choice(operations))
        for _ in range(draw.randint(0, 4)):
            words.insert(draw.randint(0, len(words)), draw.choice(globals_))
        command = f"aws {' '.join(words)}"
        verdict = check_command(command)
        result = slot.executor.run(command)
        for request in result.requests:
            sent += 1
            found = names.get(verdict.service, verdict.service), verdict.operation
            assert found == (request.service, xform_name(request.operation, "-")), command
    assert sent > 20


def play(slot: Slot, *commands: str) -> list[Any]:
    """Run commands that must all succeed and return what they printed, as data; captures are filled
    as in a task."""
    outputs: list[Any] = []
    for line in commands:
        command = resolve(line, [json.dumps(one) for one in outputs])
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
        outputs.append(json.loads(result.stdout) if result.stdout.strip() else {})
    return outputs


STEP_FUNCTION = '{"StartAt":"Rest","States":{"Rest":{"Type":"Pass","Result":{"a":1},"End":true}}}'


def test_executions_of_a_state_machine(slot: Slot) -> None:
    slot.reset()
    machine = "arn:aws:states:us-east-1:000000000000:stateMachine:m"
    run = "${step2:executionArn}"
    play(
        slot,
        f"aws stepfunctions create-state-machine --name m --definition '{STEP_FUNCTION}' "
        "--role-arn arn:aws:iam::000000000000:role/r",
        f"aws stepfunctions start-execution --state-machine-arn {machine} --input '{{}}'",
        f"aws stepfunctions describe-execution --execution-arn {run}",
        f"aws stepfunctions get-execution-history --execution-arn {run}",
        f"aws stepfunctions list-executions --state-machine-arn {machine}",
        f"aws stepfunctions tag-resource --resource-arn {machine} --tags key=a,value=b",
        f"aws stepfunctions untag-resource --resource-arn {machine} --tag-keys a",
    )
    tags = play(slot, f"aws stepfunctions list-tags-for-resource --resource-arn {machine}")[0]
    assert not tags.get("tags")


def test_transactions_and_statements_of_dynamodb(slot: Slot) -> None:
    slot.reset()
    puts = [{"Put": {"TableName": "items", "Item": {"id": {"S": one}}}} for one in "ab"]
    gets = [{"Get": {"TableName": "items", "Key": {"id": {"S": "a"}}}}]
    found = play(
        slot,
        "aws dynamodb create-table --table-name items --key-schema AttributeName=id,KeyType=HASH "
        "--attribute-definitions AttributeName=id,AttributeType=S --billing-mode PAY_PER_REQUEST",
        f"aws dynamodb transact-write-items --transact-items '{json.dumps(puts)}'",
        f"aws dynamodb transact-get-items --transact-items '{json.dumps(gets)}'",
        """aws dynamodb execute-statement --statement "INSERT INTO items VALUE {'id': 'c'}"  """,
        """aws dynamodb execute-statement --statement "SELECT * FROM items WHERE id='c'" """,
        "aws dynamodb scan --table-name items --select COUNT",
    )
    assert found[2]["Responses"][0]["Item"] == {"id": {"S": "a"}} and found[4]["Items"] == [
        {"id": {"S": "c"}}
    ]
    assert found[5]["Count"] == 3


def test_what_a_role_lends_stays_in_the_session(slot: Slot) -> None:
    """The credentials open nothing: a worker has no way to use others, and the account is as it
    was."""
    slot.reset()
    trust = (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"AWS":"*"},'
        '"Action":"sts:AssumeRole"}]}'
    )
    play(slot, f"aws iam create-role --role-name r --assume-role-policy-document '{trust}'")
    before = take_snapshot(slot)
    role = "arn:aws:iam::000000000000:role/r"
    lent = play(slot, f"aws sts assume-role --role-arn {role} --role-session-name session")[0][
        "Credentials"
    ]
    assert set(lent) >= {"AccessKeyId", "SecretAccessKey", "SessionToken"}
    assert take_snapshot(slot).resources == before.resources
    assert slot.executor.run("aws sts get-caller-identity").success
    for option in ("--profile s", "--no-sign-request"):
        assert slot.executor.run(f"aws sts get-caller-identity {option}").refusal == "global-option"


def test_versions_of_a_policy(slot: Slot) -> None:
    slot.reset()
    document = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:GetObject","Resource":"*"}]}'
    arn = "arn:aws:iam::000000000000:policy/p"
    found = play(
        slot,
        f"aws iam create-policy --policy-name p --policy-document '{document}'",
        f"aws iam create-policy-version --policy-arn {arn} --policy-document '{document}' "
        f"--set-as-default",
        f"aws iam delete-policy-version --policy-arn {arn} --version-id v1",
        f"aws iam list-policy-versions --policy-arn {arn}",
    )
    assert [(one["VersionId"], one["IsDefaultVersion"]) for one in found[3]["Versions"]] == [
        ("v2", True)
    ]


def test_batches(slot: Slot) -> None:
    slot.reset()
    queue = "http://localhost:4566/000000000000/q"
    received = "${step3:Messages[0].ReceiptHandle}"
    found = play(
        slot,
        "aws sqs create-queue --queue-name q",
        f"aws sqs send-message-batch --queue-url {queue} --entries Id=1,MessageBody=a "
        f"Id=2,MessageBody=b",
        f"aws sqs receive-message --queue-url {queue}",
        f"aws sqs change-message-visibility-batch --queue-url {queue} "
        f"--entries Id=1,ReceiptHandle={received},VisibilityTimeout=5",
        f"aws sqs delete-message-batch --queue-url {queue} --entries Id=1,ReceiptHandle={received}",
        "aws sns create-topic --name t",
        "aws sns publish-batch --topic-arn ${step6:TopicArn} "
        "--publish-batch-request-entries Id=1,Message=a Id=2,Message=b",
        "aws kinesis create-stream --stream-name s --shard-count 1",
        "aws kinesis put-records --stream-name s --records Data=a,PartitionKey=1 "
        "Data=b,PartitionKey=2",
        "aws kinesis get-shard-iterator --stream-name s --shard-id shardId-000000000000 "
        "--shard-iterator-type TRIM_HORIZON",
        "aws kinesis get-records --shard-iterator ${step10:ShardIterator}",
        """aws events put-events --entries '[{"Source": "a", "DetailType": "b", "Detail": "{}"}]'""",
    )
    assert (
        len(found[1]["Successful"]) == 2
        and len(found[6]["Successful"]) == 2
        and len(found[10]["Records"]) == 2
    )


def test_an_object_in_parts(slot: Slot) -> None:
    slot.reset()
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.files.put("part.txt", b"words")
    upload = "--bucket box --key k --upload-id ${step1:UploadId}"
    parts = '{"Parts":[{"ETag":${step2:ETag},"PartNumber":1}]}'  # an ETag has its quotes
    play(
        slot,
        "aws s3api create-multipart-upload --bucket box --key k",
        f"aws s3api upload-part {upload} --part-number 1 --body part.txt",
        f"aws s3api list-parts {upload}",
        f"aws s3api complete-multipart-upload {upload} --multipart-upload '{parts}'",
        "aws s3api create-multipart-upload --bucket box --key other",
        "aws s3api list-multipart-uploads --bucket box",
        "aws s3api abort-multipart-upload --bucket box --key other --upload-id ${step5:UploadId}",
    )
    assert slot.executor.run("aws s3 cp s3://box/k got.txt").success
    assert (slot.files.path / "got.txt").read_bytes() == b"words"
    for body in ("/etc/passwd", "../x", "./a/../../x"):
        command = (
            f"aws s3api upload-part --bucket box --key k --upload-id u --part-number 1 --body "
            f"{body}"
        )
        assert slot.executor.run(command).refusal == "local-file"


def test_what_was_made_is_removed_again(slot: Slot) -> None:
    """By the counterparts that used to be missing."""
    slot.reset()
    before = take_snapshot(slot)
    play(
        slot,
        "aws apigateway create-rest-api --name a",
        "aws apigateway get-resources --rest-api-id ${step1:id}",
        "aws apigateway put-method --rest-api-id ${step1:id} --resource-id ${step2:items[0].id} "
        "--http-method GET "
        "--authorization-type NONE",
        "aws apigateway create-deployment --rest-api-id ${step1:id}",
        "aws apigateway create-stage --rest-api-id ${step1:id} --stage-name s --deployment-id "
        "${step4:id}",
        "aws apigateway create-usage-plan --name p",
        "aws apigateway create-api-key --name k",
        "aws apigateway delete-stage --rest-api-id ${step1:id} --stage-name s",
        "aws apigateway delete-deployment --rest-api-id ${step1:id} --deployment-id ${step4:id}",
        "aws apigateway delete-method --rest-api-id ${step1:id} --resource-id ${step2:items[0].id} "
        "--http-method GET",
        "aws apigateway delete-usage-plan --usage-plan-id ${step6:id}",
        "aws apigateway delete-api-key --api-key ${step7:id}",
        "aws apigateway delete-rest-api --rest-api-id ${step1:id}",
    )
    play(
        slot,
        "aws cognito-idp create-user-pool --pool-name p",
        "aws cognito-idp create-group --group-name g --user-pool-id ${step1:UserPool.Id}",
        "aws cognito-idp delete-group --group-name g --user-pool-id ${step1:UserPool.Id}",
        "aws cognito-idp delete-user-pool --user-pool-id ${step1:UserPool.Id}",
        "aws athena create-named-query --name n --database d --query-string x",
        "aws athena delete-named-query --named-query-id ${step5:NamedQueryId}",
        "aws iam create-account-alias --account-alias able",
        "aws iam delete-account-alias --account-alias able",
        "aws ec2 create-vpc --cidr-block 10.9.0.0/16",
        "aws ec2 create-subnet --vpc-id ${step9:Vpc.VpcId} --cidr-block 10.9.1.0/24",
        "aws ec2 create-route-table --vpc-id ${step9:Vpc.VpcId}",
        "aws ec2 associate-route-table --route-table-id ${step11:RouteTable.RouteTableId} "
        "--subnet-id ${step10:Subnet.SubnetId}",
        "aws ec2 disassociate-route-table --association-id ${step12:AssociationId}",
        "aws ec2 delete-route-table --route-table-id ${step11:RouteTable.RouteTableId}",
        "aws ec2 delete-subnet --subnet-id ${step10:Subnet.SubnetId}",
        "aws ec2 delete-vpc --vpc-id ${step9:Vpc.VpcId}",
    )
    left = {key[:2] for key in take_snapshot(slot).resources.keys() - before.resources.keys()}
    assert left <= {
        ("iam", "account_aliases"),
        ("athena", "data_catalogs"),
        ("athena", "workgroups"),
    }, "AWS's own"
    assert not play(slot, "aws iam list-account-aliases")[0]["AccountAliases"]


def test_a_document_holds_the_parameters_of_a_command(slot: Slot) -> None:
    slot.reset()
    slot.files.put("q.json", b'{"QueueName": "from-file", "Attributes": {"DelaySeconds": "5"}}')
    slot.files.put("q.yaml", b"QueueName: yaml-file\nAttributes:\n  DelaySeconds: '5'\n")
    for command in (
        "aws sqs create-queue --cli-input-json file://q.json",
        "aws sqs create-queue --cli-input-yaml file://./q.yaml",
        """aws sqs create-queue --cli-input-json '{"QueueName": "inline"}'""",
        "aws --cli-input-yaml='QueueName: before' sqs create-queue",
        """aws sqs create-queue --queue-name wins --cli-input-json '{"QueueName": "loses"}'""",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    names = {
        url.rpartition("/")[2] for url in slot.state.call("sqs", "ListQueues", {})["QueueUrls"]
    }
    assert names == {"from-file", "yaml-file", "inline", "before", "wins"}
    plain = slot.executor.run("aws sqs create-queue")
    assert not plain.success and "--queue-name" in plain.stderr, (
        "what is required is required again"
    )
    assert slot.executor.run("aws sqs create-queue --queue-name plain").success


def test_a_document_reaches_nothing_but_the_working_folder(slot: Slot, tmp_path: Path) -> None:
    """Paths, links and options in it, a document to be fetched, and what is no document."""
    slot.reset()
    secret = tmp_path / "secret.json"
    secret.write_text('{"QueueName": "canary-content"}')
    (slot.files.path / "link.json").symlink_to(secret)
    slot.files.put("stack.json", b'{"StackName": "s", "TemplateURL": "http://127.0.0.1:1/t"}')
    slot.files.put("copy.json", b'{"Bucket": "b", "Key": "k", "CopySource": "_ministack/reset"}')
    slot.files.put(
        "map.json",
        b'{"Bucket": "b", "Key": "k", "CopySource": {"Bucket": "_ministack", "Key": "reset"}}',
    )
    slot.files.put("many.json", b'{"ImageId": "i", "MinCount": 1, "MaxCount": 5000}')
    slot.files.put("deep.json", b"[" * 200_000)
    slot.files.put("deep.yaml", b"[" * 200_000)
    slot.files.put("block.yaml", b"- " * 100_000)
    slot.files.put("bytes.json", bytes(range(256)))
    bomb = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [{f'*{b}, ' * 9}]\n" for b, c in ("ab", "bc", "cd")
    )
    for command, rule in (
        (f"aws sqs create-queue --cli-input-json file://{secret}", "local-file"),
        (f"aws sqs create-queue --cli-input-json FILE://{secret}", "local-file"),
        (f"aws sqs create-queue --cli-input-yaml fileb://{secret}", "local-file"),
        ("aws sqs create-queue --cli-input-json file:///proc/self/environ", "local-file"),
        ("aws sqs create-queue --cli-input-json file://../x.json", "local-file"),
        ("aws sqs create-queue --cli-input-json file://link.json", "local-file"),
        ("aws sqs create-queue --cli-input-json http://127.0.0.1:1/x", "malformed"),
        ("aws sqs create-queue --cli-input-json", "malformed"),
        ("aws sqs create-queue --cli-input-json {} --cli-input-yaml {}", "malformed"),
        ("aws sqs create-queue --cli-input-json '[1]'", "malformed"),
        ("aws sqs create-queue --cli-input-json '{\"QueueName\": NaN'", "malformed"),
        ("aws sqs create-queue --cli-input-yaml '!!python/object:os.system {}'", "malformed"),
        ("aws sqs create-queue --cli-input-json file://deep.json", "malformed"),
        ("aws sqs create-queue --cli-input-yaml file://deep.yaml", "malformed"),
        ("aws sqs create-queue --cli-input-yaml file://block.yaml", "malformed"),
        ("aws sqs create-queue --cli-input-json file://bytes.json", "local-file"),
        (f"aws ssm put-parameter --cli-input-yaml '{bomb}'", "too-many"),
        ("aws cloudformation create-stack --cli-input-json file://stack.json", "url-value"),
        ("aws s3api copy-object --cli-input-json file://copy.json", "internal-path"),
        ("aws s3api copy-object --cli-input-json file://map.json", "internal-path"),
        ("aws ec2 run-instances --cli-input-json file://many.json", "too-many"),
        ("aws sqs create-queue --cli-input-js {}", "global-option"),
        ("aws s3 ls --cli-input-json {}", "global-option"),
        ("aws dynamodb wait table-exists --cli-input-json {}", "global-option"),
        ("aws s3api get-object out.txt --cli-input-json {}", "global-option"),
    ):
        result = slot.executor.run(command)
        assert result.refusal == rule, (command, result)
        assert (
            not result.requests
            and "canary" not in result.stderr
            and str(tmp_path) not in result.stderr
        )
    assert not slot.state.call("sqs", "ListQueues", {}).get("QueueUrls")


def test_texts_for_bytes_are_never_taken_for_something_else_in_silence(slot: Slot) -> None:
    """Version 2 of the CLI takes base64 where this one takes the text itself."""
    slot.reset()
    slot.state.call("kinesis", "CreateStream", {"StreamName": "s", "ShardCount": 1})
    put = "aws kinesis put-record --stream-name s --partition-key 1"
    refused = slot.executor.run(f"{put} --data aGVsbG8=")
    assert refused.refusal == "malformed" and not refused.requests
    assert "aws-cli 1." in refused.stderr and "--cli-binary-format base64" in refused.stderr
    batch = """aws kinesis put-records --stream-name s --records '[{"Data": "aGVsbG8=", "PartitionKey": "1"}]'"""
    assert slot.executor.run(batch).refusal == "malformed"
    assert (
        slot.executor.run(f"{put} --data hello --cli-binary-format base64").refusal == "malformed"
    )
    assert (
        slot.executor.run(f"{put} --data hello --cli-binary-format hex").refusal == "global-option"
    )
    document = '\'{"StreamName": "s", "PartitionKey": "1", "Data": "aGVsbG8="}\''
    for command in (
        f"{put} --data password",
        f"{put} --data aGVsbG8= --cli-binary-format base64",
        f"{put} --data aGVsbG8= --cli-binary-format raw-in-base64-out",
        f"{batch} --cli-binary-format=base64",
        f"aws kinesis put-record --cli-binary-format base64 --cli-input-json {document}",
    ):
        result = slot.executor.run(command)
        assert result.success, (command, result.stderr)
    shard = {
        "StreamName": "s",
        "ShardId": "shardId-000000000000",
        "ShardIteratorType": "TRIM_HORIZON",
    }
    start = slot.state.call("kinesis", "GetShardIterator", shard)["ShardIterator"]
    found = slot.state.call("kinesis", "GetRecords", {"ShardIterator": start})
    assert [one["Data"] for one in found["Records"]] == [
        b"password",
        b"hello",
        b"aGVsbG8=",
        b"hello",
        b"hello",
    ]
