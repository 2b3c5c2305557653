"""docs/support.md is what the tests' marks and the records say."""

import support


def test_the_support_table_is_up_to_date():
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run python tests/support.py"


def test_marks_are_read_from_modules_and_functions(tmp_path):
    path = tmp_path / "test_a.py"
    path.write_text("@pytest.mark.gpu\ndef test_a(): ...\n\n\ndef test_b(): ...\n")
    assert support.marks_of(path) == [{"gpu"}, set()]
    assert support.marks_of(path, "_b") == [set()]
    path.write_text("pytestmark = pytest.mark.gpu\n\n\ndef test_b(): ...\n")
    assert support.marks_of(path) == [{"gpu"}]
