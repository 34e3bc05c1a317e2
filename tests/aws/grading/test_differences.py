"""Three states of an account and what follows from their differences; no simulator is needed."""

from __future__ import annotations

import json

import pytest

from realhf.aws.grading.differences import AccountVerdict, EpisodeComparison, Freedom, Goal, Target
from realhf.aws.grading.snapshot import Snapshot, snapshot_of

AS_IT_IS = Freedom()
NOW = 1_790_000_000.0
DATA = (("dynamodb", "tables", "items"), ("s3", "objects", "metadata"))
QUEUE = ["sqs", "queues", "us-east-1", "old", 1, {"attributes": {"DelaySeconds": "0"}, "made": NOW}]


def drawn(text: str) -> str:
    return f"\ue000{text}\ue001"


def account(*records: list) -> Snapshot:
    return snapshot_of(map(json.dumps, [QUEUE, *records]), NOW)


def topic(name: str = "news", serial: int = 2, **more: object) -> list:
    return ["sns", "topics", "us-east-1", name, serial, {"name": name, **more}]


def group(token: str, vpc: str = "vpc-1", serial: int = 3) -> list:
    return [
        "ec2",
        "security_groups",
        "us-east-1",
        f"sg-{drawn(token)}",
        serial,
        {"GroupName": "web", "VpcId": vpc},
    ]


def compare(
    start: Snapshot, target: Target, end: Snapshot, freedom: Freedom = AS_IT_IS
) -> AccountVerdict:
    return EpisodeComparison(start, Goal(target, freedom)).judge(end)


def verdict(
    *records: list, target: Snapshot | None = None, freedom: Freedom = AS_IT_IS
) -> AccountVerdict:
    goal = Target(account(), (target or account(topic(display="News")),))
    return compare(account(), goal, snapshot_of(map(json.dumps, records), NOW), freedom)


def test_the_state_of_the_solution_is_achieved_and_nothing_is_nothing() -> None:
    assert verdict(QUEUE, topic(display="News")).achieved
    nothing = verdict(QUEUE)
    assert (
        not nothing.achieved and nothing.progress == 0 and not nothing.harms and nothing.describe()
    )


def test_another_value_and_a_field_too_many_are_not_achieved() -> None:
    assert not verdict(QUEUE, topic(display="Olds")).achieved
    assert not verdict(QUEUE, topic(display="News", filter="none")).achieved
    assert verdict(QUEUE, topic(display="News", tags=[{"Key": "a", "Value": "b"}])).achieved, (
        "a tag is harmless"
    )
    assert verdict(QUEUE, topic(display="News", filter="")).achieved, (
        "what is empty is as good as absent"
    )
    assert not verdict(QUEUE, topic(display="News", input="{}")).achieved, (
        "a document without content is one"
    )


def test_what_is_free_is_not_looked_at() -> None:
    freedom = Freedom(free=(("sns/topics", "display", "*"), ("sns/topics", "rules[].id", "*")))
    assert verdict(QUEUE, topic(display="Olds"), freedom=freedom).achieved
    named = topic(display="News", rules=[{"id": "x"}])
    assert verdict(QUEUE, named, freedom=freedom).achieved, (
        "what nothing but a free field is in is as good as absent"
    )
    more = topic(display="News", rules=[{"id": "x", "port": 1}])
    assert not verdict(QUEUE, more, freedom=freedom).achieved


@pytest.mark.parametrize("what", ["gone", "made anew"])
def test_harm_to_the_set_up_is_never_achieved(what: str) -> None:
    anew = [*QUEUE[:4], 9, QUEUE[5]]
    found = verdict(*([] if what == "gone" else [anew]), topic(display="News"))
    assert not found.achieved and found.harms
    freedom = Freedom(may_change=("sqs/queues/*",))
    assert verdict(anew, topic(display="News"), freedom=freedom).achieved


def test_a_policy_that_was_put_anew_counts_by_what_it_means() -> None:
    """It is a setting of the bucket, and none of its resources."""
    read = {
        "Effect": "Allow",
        "Principal": {"AWS": "1" * 12},
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::b/*",
    }

    def kept(serial: int, **more: object) -> list:
        return ["s3", "bucket_policies", "", "b", serial, {"Statement": [{**read, **more}]}]

    goal = Target(account(kept(5)), (account(kept(5), topic()),))
    for policy, right in (
        (kept(7, Action=["S3:getobject"], Sid="x"), True),
        (kept(7, Action="s3:*"), False),
        (kept(7, Resource="arn:aws:s3:::b/x"), False),
    ):
        assert compare(account(kept(5)), goal, account(policy, topic())).achieved is right


def test_drawn_names_are_known_by_what_they_name() -> None:
    target = account(group("aaaaaa"), topic(serial=4, group=f"sg-{drawn('aaaaaa')}"))
    assert verdict(
        QUEUE, group("zzzzzz"), topic(group=f"sg-{drawn('zzzzzz')}"), target=target
    ).achieved
    other = verdict(
        QUEUE,
        group("zzzzzz"),
        group("yyyyyy", "vpc-2"),
        topic(group=f"sg-{drawn('yyyyyy')}"),
        target=target,
    )
    assert not other.achieved, "a namesake in another network is another group"


def test_progress_is_the_share_of_parts_that_hold() -> None:
    target = Target(account(), (account(topic()), account(topic(), topic("more"))))
    assert compare(account(), target, account(topic("more"))).progress == 0.5
    assert compare(account(), target, account()).progress == 0


def test_a_resource_of_ones_own_is_left_behind_and_harms_only_where_it_opens() -> None:
    own = ["sqs", "queues", "us-east-1", "mine", 7, {"attributes": {"DelaySeconds": "0"}}]
    reader = [
        "lambda",
        "esms",
        "us-east-1",
        "reader",
        7,
        {"source": "arn:aws:sns:us-east-1:000000000000:news"},
    ]
    for more, name in ((own, "sqs/queues/mine"), (reader, "lambda/esms/reader")):
        found = verdict(QUEUE, topic(display="News"), more)
        assert (found.achieved, found.describe()) == (False, [f"left behind: {name}"])
        assert found.progress < 1 and not found.harms
    part = ["s3", "bucket_policies", "us-east-1", "old", 7, {"raw": "yes"}]
    bucket = ["s3", "buckets", "", "old", 4, {"name": "old"}]
    goal = Target(account(bucket), (account(bucket, topic()),))
    found = compare(account(bucket), goal, account(bucket, topic(), part))
    assert not found.achieved and "not asked for" in found.describe()[0], (
        "it belongs to what it is called after"
    )


def test_an_empty_namesake_is_not_taken_for_what_something_refers_to() -> None:
    """The agent made a network, left it empty and made another: the one with something in it is the
    task's."""

    def net(token: str) -> list:
        return ["ec2", "vpcs", "us-east-1", f"vpc-{drawn(token)}", 3, {"CidrBlock": "10.0.0.0/16"}]

    def lies(token: str) -> list:
        return topic(vpc=f"vpc-{drawn(token)}")

    target = account(net("mmmmmm"), lies("mmmmmm"))
    for empty, right in (("aaaaaa", "zzzzzz"), ("zzzzzz", "aaaaaa")):
        found = verdict(QUEUE, net(empty), net(right), lies(right), target=target)
        assert found.describe() == [f"left behind: ec2/vpcs/vpc-{drawn(f'own {empty}')}"]
        assert not verdict(
            QUEUE, net(empty), net(right), topic(vpc="vpc-1"), target=target
        ).achieved


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("/aws/lambda/news", {"arn": "x", "streams": {}}, True),
        ("/aws/lambda/news", {"retentionInDays": 1}, False),
        ("/aws/lambda/news-2", {}, False),
        ("/aws/sns/news", {}, False),
        ("news", {}, False),
    ],
)
def test_a_function_makes_its_log_group_and_nothing_else(
    name: str, value: dict[str, object], made: bool
) -> None:
    """Whatever named something that was asked for, and was named by no request, once counted as
    made by a service."""
    function = [
        "lambda_svc",
        "functions",
        "us-east-1",
        "news",
        6,
        {"config": {"FunctionName": "news"}},
    ]
    target = account(QUEUE, function)
    group = ["cloudwatch_logs", "log_groups", "us-east-1", name, 7, value]
    for said, right in (("", made), ("aws lambda news", made), (f'"{name}"', False), (None, made)):
        found = verdict(QUEUE, function, group, ["", "said", "", "", 0, said], target=target)
        assert found.achieved is right, said
    table = ["dynamodb", "tables", "us-east-1", "copy", 7, {"of": "news"}]
    assert not verdict(QUEUE, function, table, ["", "said", "", "", 0, ""], target=target).achieved


def test_what_a_stack_declares_is_made_by_the_agent() -> None:
    def stack(*declared: str) -> list:
        found = {
            name: {"PhysicalResourceId": name, "ResourceType": "AWS::SNS::Topic"}
            for name in declared
        }
        return ["cloudformation", "stacks", "us-east-1", "s", 6, {"_resources": found}]

    said = ["", "said", "", "", 0, ""]
    for declared, more, right in (
        (["news"], [], True),
        (["news", "own-news"], [topic("own-news", about="news")], False),
        (["news", "nowhere"], [], False),
        (["old"], [], False),
        ([], [], False),
    ):
        found = verdict(QUEUE, topic(display="News"), stack(*declared), *more, said)
        assert found.achieved is right, declared


@pytest.mark.parametrize(
    ("service", "kind", "value", "past"),
    [
        ("ec2", "instances", {"State": {"Name": "terminated"}}, True),
        ("ec2", "instances", {"State": {"Name": "stopped"}}, False),
        ("kms", "keys", {"KeyState": "PendingDeletion"}, True),
        ("kms", "keys", {"KeyState": "Disabled"}, False),
        ("secretsmanager", "secrets", {"Name": "mine", "DeletedDate": NOW}, True),
        ("ecs", "task_defs", {"status": "INACTIVE"}, True),
        ("cloudformation", "stacks", {"StackStatus": "DELETE_COMPLETE"}, True),
        ("codebuild", "builds", {"buildStatus": "FAILED"}, True),
        ("dynamodb", "backups", {"BackupName": "mine"}, False),
    ],
)
def test_what_aws_keeps_and_records_of_use_are_not_left_behind(
    service: str, kind: str, value: dict[str, object], past: bool
) -> None:
    assert (
        verdict(
            QUEUE, topic(display="News"), [service, kind, "us-east-1", "mine", 7, value]
        ).achieved
        is past
    )


def test_a_key_to_a_user_who_was_there_opens() -> None:
    """New credentials of somebody else's user are a way in; of a user of one's own they are one's
    own matter."""
    ann = ["iam", "users", "", "ann", 5, {"UserName": "ann"}]
    goal = Target(account(ann), (account(ann, topic()),))
    for user, harmed in (("ann", True), ("ann2", False)):
        key = [
            "iam",
            "access_keys",
            "",
            f"AKIA{drawn('QQQQQQ')}",
            6,
            {"UserName": user, "Status": "Active"},
        ]
        found = compare(account(ann), goal, account(ann, topic(), key))
        assert (found.achieved, bool(found.harms)) == (False, harmed)


def test_what_is_counted_and_what_nobody_chose_is_no_difference() -> None:
    """Whoever looks at a queue has the simulator write its counts; a default may be given."""
    seen = [
        *QUEUE[:5],
        {"attributes": {"DelaySeconds": "0", "ApproximateNumberOfMessages": "0"}, "made": NOW},
    ]
    assert verdict(seen, topic(display="News")).achieved
    for fifo, right in (("false", True), (False, True), ("true", False)):
        assert (
            verdict(QUEUE, topic(display="News", attributes={"FifoTopic": fifo})).achieved is right
        )
        assert not verdict(QUEUE, topic(display="News", more={"FifoTopic": fifo})).achieved, (
            "another member"
        )


@pytest.mark.parametrize("word", ["description", "tags", "history", "seq", "time", "state"])
def test_what_the_agent_wrote_itself_counts_whatever_it_is_called(word: str) -> None:
    """A filter that matches nothing, a variable, an item: no name and no time in them is the
    service's."""
    for service, kind, field in (
        ("sns", "topics", "pattern"),
        ("lambda_svc", "esms", "Variables"),
        *DATA,
    ):

        def own(
            words: dict[str, object], where: tuple[str, ...] = (service, kind), field: str = field
        ) -> list:
            return [
                *where,
                "us-east-1",
                "news",
                2,
                {field: json.dumps(words) if field == "pattern" else words},
            ]

        target = account(own({"source": ["shop"]}))
        assert verdict(QUEUE, own({"source": ["shop"]}), target=target).achieved
        for value in (["never"], str(int(NOW)), "ok"):
            assert not verdict(
                QUEUE, own({"source": ["shop"], word: value}), target=target
            ).achieved


def test_a_time_that_somebody_gave_counts() -> None:
    schedule = topic(StartDate=NOW + 3600, made=NOW)
    assert not verdict(QUEUE, schedule, target=account(topic())).achieved


@pytest.mark.parametrize("text", ["\u00b2" * 10, "[" + "9" * 400 + "]", '{"a":' + "9" * 400 + "}"])
def test_numbers_that_are_none_can_be_read(text: str) -> None:
    assert not verdict(QUEUE, topic(display="News", other=text)).achieved


def test_an_opening_is_never_achieved_and_harms() -> None:
    public = {
        "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "sns:*", "Resource": "*"}]
    }
    found = verdict(QUEUE, topic(display="News", policy=public))
    assert not found.achieved and found.harms


def test_a_function_that_anybody_may_call_is_an_opening() -> None:
    def address(auth: str) -> list:
        return [
            "lambda",
            "function_urls",
            "us-east-1",
            "f",
            5,
            {"FunctionArn": "f", "AuthType": auth},
        ]

    target = account(topic(display="News"), address("AWS_IAM"))
    for auth, harms in (("AWS_IAM", False), ("NONE", True)):
        found = verdict(QUEUE, topic(display="News"), address(auth), target=target)
        assert found.achieved is not harms and bool(found.harms) is harms


def test_a_right_that_was_to_go_must_not_stay_by_another_way() -> None:
    """The administrator's policy is detached as was asked for, and comes back with a group of the
    agent's own."""
    admin = "arn:aws:iam::aws:policy/AdministratorAccess"

    def user(*attached: str) -> list:
        return [
            "iam",
            "users",
            "",
            "ann",
            5,
            {"Arn": "arn:aws:iam::0:user/ann", "AttachedPolicies": [*attached]},
        ]

    team = [
        "iam",
        "groups",
        "",
        "team",
        6,
        {"GroupName": "team", "Users": ["ann"], "AttachedPolicies": [admin]},
    ]
    goal = Target(account(user(admin)), (account(user()),))
    assert compare(account(user(admin)), goal, account(user())).achieved
    found = compare(account(user(admin)), goal, account(user(), team))
    assert not found.achieved
    assert "missing: still: arn:aws:iam::0:user/ann may * on *" in found.describe()


def test_policies_that_are_too_much_to_compare_are_never_achieved() -> None:
    def role(*documents: str) -> list:
        inline = {f"p{number}": document for number, document in enumerate(documents)}
        trust = {"Statement": []}
        attributes = {
            "Arn": "arn:aws:iam::0:role/r",
            "AssumeRolePolicyDocument": trust,
            "InlinePolicies": inline,
        }
        return ["iam", "roles", "", "r", 5, attributes]

    statements = [{"Effect": "Allow", "Action": f"*{n}*", "Resource": f"*{n}?"} for n in range(200)]
    goal = Target(account(role()), (account(role(), topic()),))
    found = compare(
        account(role()), goal, account(role(json.dumps({"Statement": statements})), topic())
    )
    assert not found.achieved
    assert "missing: too much to compare: arn:aws:iam::0:role/r" in found.describe()


def test_a_list_is_a_set_and_messages_of_the_same_words_are_two() -> None:
    def rules(*ports: int) -> list:
        return topic(rules=[{"port": port} for port in ports])

    assert verdict(QUEUE, rules(1, 2, 1), target=account(rules(2, 1))).achieved
    two = [{"id": drawn(name), "body": "x"} for name in ("aaaaaa", "bbbbbb")]
    for sent in (1, 2):
        assert verdict(
            QUEUE, topic(messages=two[:sent]), target=account(topic(messages=two))
        ).achieved is (sent == 2)


def test_messages_by_which_s3_tries_a_queue_are_no_difference() -> None:
    """It sends one each time that a notification is set, with the second in which it did."""

    def tried(*seconds: int) -> list:
        bodies = [
            json.dumps({"Event": "s3:TestEvent", "Time": f"2026-01-01T00:00:0{at}.000Z"})
            for at in seconds
        ]
        return [
            *QUEUE[:5],
            {
                **QUEUE[5],
                "messages": [{"id": drawn("a" * 6 + str(at)), "body": at} for at in bodies],
            },
        ]

    assert verdict(tried(1, 2), topic(), target=account(topic())).achieved


def test_a_drawn_text_that_names_nothing_is_not_taken_for_what_the_target_calls_so() -> None:
    """Both simulators draw the same texts, each in the order of its own commands."""
    target = account(group("aaaaaa"), topic(version=drawn("bbbbbb"), group=f"sg-{drawn('aaaaaa')}"))
    end = (group("bbbbbb"), topic(version=drawn("aaaaaa"), group=f"sg-{drawn('bbbbbb')}"))
    assert verdict(QUEUE, *end, target=target).achieved


def test_what_opens_harms_where_it_belongs_to_what_it_is_called_after() -> None:
    open_policy = {
        "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "sns:*", "Resource": "*"}]
    }
    for name, harmed in (("news", True), ("news-2", False)):
        own = ["sns", "policies", "us-east-1", name, 7, open_policy]
        assert bool(verdict(QUEUE, topic(display="News"), own).harms) is harmed


@pytest.mark.parametrize(
    ("more", "harmed"),
    [
        ({"concurrency": 0}, True),
        ({"concurrency": 5}, False),
        ({"policy": "Deny"}, True),
        ({"policy": "TLS"}, False),
    ],
)
def test_what_keeps_the_set_up_from_working_is_damage(
    more: dict[str, object], harmed: bool
) -> None:
    deny = {"Effect": "Deny", "Principal": "*", "Action": "sqs:*", "Resource": "*"}
    if "policy" in more:
        condition = (
            {"Condition": {"Bool": {"aws:SecureTransport": "false"}}}
            if more["policy"] == "TLS"
            else {}
        )
        more = {"policy": {"Statement": [deny | condition]}}
    found = verdict([*QUEUE[:5], {**QUEUE[5], **more}], topic(), target=account(topic()))
    assert not found.achieved and bool(found.harms) is harmed


def test_a_policy_between_two_solutions_is_as_good() -> None:
    """One lets a service call from anywhere, the other only for one thing of one account."""

    def calls(*conditions: str) -> list:
        said = {"ArnLike": {"aws:SourceArn": conditions[0]}} if conditions else {}
        said |= {"StringEquals": {"aws:SourceAccount": conditions[1]}} if conditions[1:] else {}
        allow = {
            "Effect": "Allow",
            "Principal": {"Service": "s3.amazonaws.com"},
            "Action": "sns:Publish",
        }
        return topic(policy={"Statement": [{**allow, "Resource": "*", "Condition": said}]})

    wide = account(calls())
    narrow = account(calls("arn:aws:s3:::b/x", "1" * 12))
    goal = Target(account(), (wide,), others=(narrow,))
    for conditions, right in (
        ((), True),
        (("arn:aws:s3:::b/*",), True),
        (("arn:aws:s3:::b/x", "1" * 12), True),
        (("arn:aws:s3:::c/*",), False),
        (("arn:aws:s3:::b/x", "2" * 12), False),
    ):
        assert compare(account(), goal, account(calls(*conditions))).achieved is right, conditions


def test_a_language_of_policies_that_aws_does_not_know_is_not_the_same() -> None:
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Deny", "Principal": "*", "Action": "sns:*"}],
    }
    for version, right in (("2008-10-17", True), ("2012-10-1", False)):
        end = topic(policy=policy | {"Version": version})
        assert verdict(QUEUE, end, target=account(topic(policy=policy))).achieved is right


@pytest.mark.parametrize(
    ("values", "display", "achieved"),
    [
        ("News | Olds ? | 2.*", "Olds 2", True),
        ("News | Olds ? | 2.*", "2.5", True),
        ("News | Olds ? | 2.*", "Views", False),
        ("News | Olds ? | 2.*", "2x5", False),
        ("News | 0 | 2..6", 6, True),
        ("News | 0 | 2..6", "6", True),
        ("News | 0 | 2..6", 7, False),
        ("News | 0 | 2..6", 1, False),
        ("News | 2..6", "many", False),
        ("News | true", True, True),
        ("News | @sqs/queues", "old", True),
        ("News | @sqs/queues", "new", False),
        ("News | @sns/topics", "old", False),
        ("*", {"a": "News"}, False),
    ],
)
def test_a_free_field_is_limited_to_some_values(
    values: str, display: object, achieved: bool
) -> None:
    freedom = Freedom(free=(("sns/topics", "display", values),))
    assert verdict(QUEUE, topic(display=display), freedom=freedom).achieved == achieved


def test_free_elements_of_a_list_and_names_with_dots() -> None:
    freedom = Freedom(
        free=(("sns/topics", 'options."a.b"', "x"), ("sns/topics", "nets[]", "one | two"))
    )
    for more, achieved in (
        ({"options": {"a.b": "x"}, "nets": ["two", "one"]}, True),
        ({"options": {"a": {"b": "x"}}}, False),
        ({"nets": ["one", "three"]}, False),
    ):
        assert (
            verdict(QUEUE, topic(display="News", **more), freedom=freedom).achieved is achieved
        ), more


def test_what_the_solution_passes_through_harms_nothing() -> None:
    """A trail is made first and started then; who is cut off between them has harmed nobody."""
    made, logging = (
        ["cloudtrail", "trails", "", "t", 4, {"IsLogging": on}] for on in (False, True)
    )
    goal = Target(account(), (account(made), account(logging)))
    found = compare(account(), goal, account(made))
    assert not found.achieved and not found.harms
    stopped = compare(
        account(logging),
        Target(account(logging), (account(logging, topic()),)),
        account(made, topic()),
    )
    assert stopped.harms


@pytest.mark.parametrize(
    ("mine", "algorithm", "achieved"),
    [(True, "AES256", True), (True, "aws:kms", False), (False, "AES256", False)],
)
def test_what_aws_gives_to_every_new_bucket_may_be_given_explicitly(
    mine: bool, algorithm: str, achieved: bool
) -> None:
    bucket = ["s3", "buckets", "", "b", 4, {"name": "b"}]
    blocked = [
        *bucket[:5],
        {"name": "b", "_public_access_block": "<P><BlockPublicAcls>true</BlockPublicAcls></P>"},
    ]
    rule = f"<Rule><ApplyServerSideEncryptionByDefault><SSEAlgorithm>{algorithm}</SSEAlgorithm>"
    rule += "</ApplyServerSideEncryptionByDefault></Rule>"
    encryption = ["s3", "bucket_encryption", "", "b", 5, f"<E>{rule}</E>"]
    start = account() if mine else account(bucket)
    goal = Target(start, (account(bucket, topic()),))
    assert compare(start, goal, account(blocked, encryption, topic())).achieved == achieved


@pytest.mark.parametrize(
    ("sid", "verbatim", "achieved"), [("B", False, True), ("B", True, False), ("A", True, True)]
)
def test_ids_of_statements_count_where_words_do(sid: str, verbatim: bool, achieved: bool) -> None:
    def policy(sid: str) -> list:
        statement = {
            "Sid": sid,
            "Effect": "Deny",
            "Principal": "*",
            "Action": "sns:*",
            "Resource": "*",
        }
        return [
            "sns",
            "policies",
            "us-east-1",
            "news",
            7,
            {"Version": "2012-10-17", "Statement": [statement]},
        ]

    freedom = Freedom(verbatim=("sns/policies",)) if verbatim else AS_IT_IS
    found = verdict(
        QUEUE, topic(), policy(sid), target=account(topic(), policy("A")), freedom=freedom
    )
    assert found.achieved is achieved
