"""The `zoo` command: reads a command line, calls the library, answers in text or JSON.

main            selects the command; exit codes for errors and Ctrl-C
models, planning_commands, comparison    the commands; these files do not import each other
model_spec      the model and its inputs
parser, values  strict options with suggestions, and the types of their values
output          files, messages, terminals without Unicode, nothing but JSON on stdout
interrupts      Ctrl-C before a command starts
"""
