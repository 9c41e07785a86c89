"""What tests of commands share."""

from tape_pe.cli import main


def refused(capsys, *arguments: object) -> str:
    """The one line that the command prints when it refuses its input."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("tape: error: ")
    assert output.err.count("\n") == 1
    return output.err
