"""The `zoo` command: reads a command line, calls the library, says in words or JSON what it found.

starting    Ctrl-C before there is a command
main        which command, and what becomes of errors and Ctrl-C
commands/   one file per command; they do not know each other
subject     which model, and on what inputs
parser      strict options with suggestions; what an answer looks like
values      text of the command line as numbers, shapes and plans
"""
