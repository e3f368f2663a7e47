import pytest

from jaxpp_async.planning.versioned_file import load_versioned, save_versioned


def test_a_value_comes_back_and_replaces_the_file(tmp_path):
    path = tmp_path / "x.json"
    for value in ({"a": 1}, {"a": 2}):
        save_versioned(path, "things", 3, value)
        assert load_versioned(path, "things", 3, dict[str, int], ValueError, "try again") == value
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_another_kind_another_version_and_damage(tmp_path):
    path = tmp_path / "x.json"
    save_versioned(path, "things", 3, {"a": 1})

    def refused(kind, version, value_type, message):
        with pytest.raises(ValueError, match=message):
            load_versioned(path, kind, version, value_type, ValueError, "try again")

    refused("others", 3, dict[str, int], "x.json' is no file of kind 'others', but of 'things'; try again")
    refused("things", 4, dict[str, int], "has version 3, .* reads 'things' of version 4; try again")
    refused("things", 3, dict[str, str], "or it is damaged: Expected `str`, got `int`")
    path.write_text("{")
    refused("things", 3, dict[str, int], "is no file of kind 'things', or it is damaged: Input data was")
