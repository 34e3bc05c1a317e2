"""Checks that look inside a resource, against a real simulator; what the advanced tier promises as a whole."""

from typing import Any

import pytest

from realhf.aws.grading.check_parser import parse_check
from realhf.aws.grading.end_state import services_of
from realhf.aws.grading.verifier import search
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks import load_templates


def holds(slot: Slot, service: str, kind: str, name: str, **attributes: Any) -> bool:
    check = {"service": service, "type": kind, "name": name, "attributes": attributes}
    return parse_check(check).holds(slot.state)


@pytest.mark.sim
def test_what_hangs_on_an_id_is_found_by_the_name_of_its_owner(slot: Slot) -> None:
    slot.reset(1)
    tags = [{"ResourceType": "vpc", "Tags": [{"Key": "Name", "Value": "shop"}]}]
    vpc = slot.state.call("ec2", "CreateVpc", {"CidrBlock": "10.9.0.0/16", "TagSpecifications": tags})["Vpc"]["VpcId"]
    assert holds(slot, "ec2", "vpc", "shop", **{"Subnets[].CidrBlock": []})
    slot.state.call("ec2", "CreateSubnet", {"VpcId": vpc, "CidrBlock": "10.9.1.0/24"})
    assert holds(slot, "ec2", "vpc", "shop", **{"Subnets[].CidrBlock": ["10.9.1.0/24"]})
    assert not holds(slot, "ec2", "vpc", "shop-2", **{"Subnets[].CidrBlock": ["10.9.1.0/24"]})


@pytest.mark.sim
def test_an_extra_may_need_what_another_one_found(slot: Slot) -> None:
    slot.reset(1)
    slot.state.call("athena", "CreateWorkGroup", {"Name": "team"})
    wanted = {"Queries[].QueryString": ["SELECT 1"]}
    assert not holds(slot, "athena", "work-group", "team", **wanted), "no query, so nothing to ask for by id"
    query = {"Name": "one", "Database": "d", "QueryString": "SELECT 1", "WorkGroup": "team"}
    slot.state.call("athena", "CreateNamedQuery", query)
    assert holds(slot, "athena", "work-group", "team", **wanted)


@pytest.mark.sim
def test_an_absent_task_definition_or_stack_is_no_failure_of_the_simulator(slot: Slot) -> None:
    slot.reset(1)
    assert not holds(slot, "ecs", "task-definition", "nothing")
    call = {"service": "cloudformation", "operation": "DescribeStacks", "params": {"StackName": "nothing"}}
    assert parse_check({"call": call, "absent": True}).holds(slot.state)


def test_policies_are_read_as_documents() -> None:
    found = {"Policy": '{"Statement": [{"Effect": "Allow", "Action": "sqs:SendMessage"}]}', "Broken": "{"}
    assert search("json(Policy).Statement[?Effect=='Allow'].Action", found) == ["sqs:SendMessage"]
    assert search("json(Broken)", found) is search("json(Missing)", found) is None
    assert search("contains(Missing, 'x')", found) is None


def test_advanced_tasks_are_25_over_many_services_with_5_held_out() -> None:
    templates = load_templates(["advanced"])
    assert [template.task_id for template in templates] == list(range(301, 326))
    assert sum(template.split == "heldout" for template in templates) == 5
    everything = set()
    for template in templates:
        services = services_of(template.solution)
        assert len(services) >= 2 and len(template.descriptions) >= 2 and len(template.partial_solutions) >= 2
        everything |= services
    assert len(everything) >= 28
