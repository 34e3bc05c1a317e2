"""No selector of a served read is ignored: some services with every run, all of them by night."""

import json

import pytest
from botocore import xform_name

from realhf.aws.simulator.selectors import read_narrowings, read_selector_table
from realhf.aws.simulator.slot import Slot
from tests.aws.validation import conformance
from tests.aws.validation.conformance import PAGE, examine, model, served_reads

_SAMPLE = ("iam", "cloudwatch", "autoscaling", "apigateway")


@pytest.mark.slow
def test_the_page_knows_every_served_read_that_takes_selectors() -> None:
    """A read that is served anew is asked by ``python -m tests.aws.validation.conformance
    --write``."""
    page = PAGE.read_text()
    for service, operation in served_reads():
        if any(conformance.selectors(service, operation)):
            row = f"| {service} | {xform_name(operation, '-')} |"
            assert row in page, f"{row}: python -m tests.aws.validation.conformance --write"


def test_what_is_kept_here_names_members_and_pages() -> None:
    for each in read_narrowings():
        assert each.page.startswith("https://docs.aws.amazon.com/") and each.operation in each.page
        assert each.operation in read_selector_table()[each.service]["operations"], each


@pytest.mark.sim
@pytest.mark.slow
def test_no_selector_of_some_services_is_ignored(slot: Slot) -> None:
    """What the table says is what the simulator does, and nothing that an agent asks for is
    ignored."""
    slot.reset(1)
    report = examine(slot, [read for read in served_reads() if read[0] in _SAMPLE])
    assert report.leaks() == []
    known = read_selector_table()
    for service in _SAMPLE:
        name = model(service).signing_name
        operations = {read[1] for read in served_reads() if read[0] == service}
        kept = {
            each: what for each, what in known[name]["operations"].items() if each in operations
        }
        assert json.dumps(kept, sort_keys=True) == json.dumps(
            report.table[name]["operations"], sort_keys=True
        )


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.nightly
def test_table_and_page_are_what_the_simulator_does(slot: Slot) -> None:
    slot.reset(1)
    report = examine(slot, served_reads())
    assert report.leaks() == []
    assert report.table == read_selector_table()
    assert report.page() == PAGE.read_text()


def ask(slot: Slot, line: str) -> tuple[int, str, str]:
    result = slot.executor.run(f"aws {line}")
    return result.exit_code, result.stdout.strip(), " ".join(result.stderr.split())


@pytest.mark.sim
@pytest.mark.slow
def test_subnets_are_found_by_the_other_names_of_their_filters(slot: Slot) -> None:
    slot.reset(1)
    vpc = json.loads(ask(slot, "ec2 create-vpc --cidr-block 10.0.0.0/16")[1])["Vpc"]["VpcId"]
    for zone, block in (("us-east-1a", "10.0.1.0/24"), ("us-east-1b", "10.0.2.0/24")):
        made = ask(
            slot,
            f"ec2 create-subnet --vpc-id {vpc} --cidr-block {block} --availability-zone {zone}",
        )
        assert made[0] == 0, made
    for name, value, right in (
        ("cidrBlock", "10.0.1.0/24", {"10.0.1.0/24"}),
        ("cidr", "10.0.2.0/24", {"10.0.2.0/24"}),
        ("availabilityZone", "us-east-1a", {"10.0.1.0/24"}),
        ("defaultForAz", "false", {"10.0.1.0/24", "10.0.2.0/24"}),
        ("defaultForAz", "true", set()),
    ):
        line = f"ec2 describe-subnets --filters Name=vpc-id,Values={vpc} Name={name},Values={value}"
        code, found, error = ask(slot, line)
        assert code == 0, error
        assert {subnet["CidrBlock"] for subnet in json.loads(found)["Subnets"]} == right, line


@pytest.mark.sim
@pytest.mark.slow
def test_a_refused_selector_is_named(slot: Slot) -> None:
    slot.reset(1)
    for line, told in (
        (
            "ec2 describe-instances --filters Name=no-such-filter,Values=x",
            "the filter 'no-such-filter' of --filters",
        ),
        ("cloudwatch describe-alarms --children-of-alarm-name x", "--children-of-alarm-name"),
        (
            "s3api list-objects-v2 --bucket b --expected-bucket-owner 111111111111",
            "--expected-bucket-owner",
        ),
        ("codebuild list-projects --sort-by NAME", "--sort-by"),
        ("iam list-policies --policy-usage-filter PermissionsBoundary", "--policy-usage-filter"),
        ("apigateway get-usage-plans --key-id x", "--key-id"),
    ):
        exit_code, _, error = ask(slot, line)
        assert exit_code != 0 and f"{told} is not supported by this simulator" in error, error
    assert ask(slot, "kms create-key")[0] == 0
    key = json.loads(ask(slot, "kms list-keys")[1])["Keys"][0]["KeyId"]
    assert ask(slot, f"kms get-key-policy --key-id {key} --policy-name default")[0] == 0


@pytest.mark.sim
@pytest.mark.slow
def test_filters_of_machines_leave_out_machines(slot: Slot) -> None:
    """Most filters were ignored; a reservation keeps the machines that match, and goes when it has
    none."""
    slot.reset(1)
    start = "ec2 run-instances --image-id ami-1 --query Instances[].InstanceId --output text"
    for name in ("one", "two"):
        assert ask(slot, f"ec2 create-key-pair --key-name {name}")[0] == 0
    first = ask(slot, f"{start} --instance-type t3.micro --key-name one --count 2")[1].split()
    second = ask(slot, f"{start} --instance-type t3.micro --key-name two")[1].split()
    query = "--query Reservations[].Instances[].InstanceId --output text"
    assert (
        ask(slot, f"ec2 describe-instances --filters Name=key-name,Values=two {query}")[1].split()
        == second
    )
    assert (
        ask(slot, f"ec2 describe-instances --filters Name=key-name,Values=o* {query}")[1].split()
        == first
    )
    asked = f"Name=key-name,Values=one,two Name=instance-id,Values={first[1]}"
    assert ask(slot, f"ec2 describe-instances --filters {asked} {query}")[1].split() == first[1:]
    assert (
        "Invalid availability zone"
        in ask(slot, "ec2 describe-availability-zones --zone-names us-east-1z")[2]
    )


@pytest.mark.sim
def test_the_default_network_is_found_by_either_name_of_the_filter(slot: Slot) -> None:
    """EC2 has always taken the name that stands in the answer; it was refused."""
    ask(slot, "ec2 create-vpc --cidr-block 10.0.0.0/16")
    query = "--query Vpcs[].IsDefault --output text"
    for name in ("is-default", "isDefault"):
        for value in ("true", "false"):
            found = ask(slot, f"ec2 describe-vpcs --filters Name={name},Values={value} {query}")[1]
            assert found.lower().split() == [value], name
