"""Meshes as texts, and what they refuse."""

import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import MeshShape


def test_a_mesh_is_read_as_it_is_written():
    assert MeshShape.parse("data=4,expert=2") == MeshShape(data=4, expert=2)
    assert MeshShape.parse("expert=2") == MeshShape(expert=2)
    assert MeshShape.parse(str(MeshShape(3, 5))) == MeshShape(3, 5)
    assert MeshShape(4, 2).devices == 8
    assert MeshShape(4, 2).rows(24) == 3
    MeshShape(4, 2).check_experts(6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=4,model=2", "unknown axis 'model'; axes are data and expert, as in data=4,expert=2"),
        ("data", "axis data needs a number, as in data=2"),
        ("data=-1", "axis data needs a number, as in data=2"),
        ("data=2,data=2", "axis data is named twice"),
        ("expert=0", "mesh axis expert is 0; it must be at least 1"),
    ],
)
def test_other_texts_are_one_line(text, message):
    with pytest.raises(UserError, match=message) as refused:
        MeshShape.parse(text)
    assert "\n" not in str(refused.value)


def test_what_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"12 requests .* 8 devices .* a multiple of 8, such as 8"):
        MeshShape(4, 2).rows(12)
    with pytest.raises(UserError, match="8 experts do not divide over 3 devices"):
        MeshShape(1, 3).check_experts(8)


def test_more_devices_than_there_are():
    with pytest.raises(UserError, match="data=64,expert=2 needs 128 devices, there are"):
        MeshShape(64, 2).mesh()
