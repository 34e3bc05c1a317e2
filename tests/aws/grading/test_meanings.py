"""What members mean: the tables name what botocore's models know, and nothing else is harmless."""

from collections.abc import Iterator

import botocore.loaders
import pytest
import yaml

from realhf.aws.grading import meanings
from realhf.aws.grading.meanings import holds_tags, is_setting, only_describes

TABLES = yaml.safe_load(meanings.resources.files("realhf.aws.grading").joinpath("meanings.yaml").read_text())
LOADER = botocore.loaders.create_loader()


def types_of(service: str, member: str) -> set[str]:
    """Return the types that a service's model has for members of this name, in any case."""
    shapes = LOADER.load_service_model(service, "service-2")["shapes"]
    named = [
        inner["shape"]
        for shape in shapes.values()
        for name, inner in shape.get("members", {}).items()
        if name.lower() == member.lower()
    ]
    return {shapes[shape]["type"] for shape in named}


def written(table: str) -> Iterator[tuple[str, str]]:
    for kind, paths in TABLES[table].items():
        for path in [paths] if isinstance(paths, str) else paths:
            yield kind, path


@pytest.mark.parametrize(("kind", "path"), written("descriptions"))
def test_a_description_is_a_text_in_the_services_model(kind: str, path: str) -> None:
    assert "string" in types_of(kind.partition("/")[0], path.rpartition("/")[2])


@pytest.mark.parametrize(("kind", "path"), written("tags"))
def test_tags_are_a_list_or_a_map_in_the_services_model(kind: str, path: str) -> None:
    assert types_of(kind.partition("/")[0], path.rpartition("/")[2]) & {"list", "map"}


@pytest.mark.parametrize(
    ("key", "path", "harmless"),
    [
        (("dynamodb", "tables", "t"), "SSEDescription/KMSMasterKeyArn", False),
        (("dynamodb", "tables", "t"), "Description", False),
        (("ecs", "services", "c/s"), "enableECSManagedTags", False),
        (("backup", "selections", "s"), "ListOfTags[]", False),
        (("events", "rules", "r"), "Description", True),
        (("events", "rules", "r"), "EventPattern/{document}/Description", False),
        (("events", "rules", "r"), "More/Description", False),
        (("lambda", "functions", "f"), "aliases/stable/Description", True),
        (("lambda", "functions", "f"), "config/Environment/Variables/{document}/tags", False),
        (("lambda", "functions", "f"), "tags/a/b", True),
        (("iam", "roles", "r"), "Tags[]", True),
        (("iam", "roles", "r"), "Tags", False),
        (("ec2", "tags", "i-1"), "[]", True),
    ],
)
def test_harmless_text_is_named_exactly(key: tuple[str, str, str], path: str, harmless: bool) -> None:
    assert only_describes(key, path) is harmless


def test_kinds_are_named_exactly() -> None:
    assert is_setting(("s3", "bucket_policies", "b")) and is_setting(("s3", "bucket_tags", "b"))
    assert not is_setting(("s3", "buckets", "b")) and not is_setting(("iam", "policies", "p"))
    assert holds_tags(("s3", "bucket_tags", "b")) and not holds_tags(("x", "bucket_tags", "b"))
