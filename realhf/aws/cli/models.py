"""Gives botocore's models of services with types: operations, and the members, bounds and words of shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import botocore.session
from botocore.exceptions import UnknownServiceError
from botocore.model import ListShape, MapShape, OperationModel, ServiceModel, Shape, StringShape, StructureShape


@functools.cache
def _session() -> botocore.session.Session:
    return botocore.session.Session()


@functools.cache
def operation_models(service: str) -> Mapping[str, OperationModel]:
    """Return the operations of a service (botocore's name) by their API names; none for an unknown service."""
    try:
        model: ServiceModel = _session().get_service_model(service)
    except UnknownServiceError:
        return {}
    return {name: model.operation_model(name) for name in cast(Sequence[str], model.operation_names)}


def members(shape: Any) -> Mapping[str, Shape]:
    """Return the members of a structure; none for any other shape."""
    return cast(Mapping[str, Shape], shape.members) if isinstance(shape, StructureShape) else {}


def required_members(shape: Any) -> Sequence[str]:
    """Return the members that a structure must have."""
    return cast(Sequence[str], shape.required_members) if isinstance(shape, StructureShape) else ()


def element(shape: Any) -> Shape | None:
    """Return the shape of a list's elements or of a map's values; None for any other shape."""
    if isinstance(shape, MapShape):
        return cast(Shape, shape.value)
    return cast(Shape, shape.member) if isinstance(shape, ListShape) else None


def words(shape: Any) -> Sequence[str]:
    """Return the words that a text may be, those of the keys for a map; none where any text will do."""
    if isinstance(shape, MapShape):
        return words(cast(Shape, shape.key))
    return list(cast(Sequence[str], shape.enum)) if isinstance(shape, StringShape) else ()


def bounds(shape: Any) -> Mapping[str, Any]:
    """Return what the model says of a value's size: perhaps ``min`` and ``max``."""
    return cast(Mapping[str, Any], shape.metadata) if shape is not None else {}
