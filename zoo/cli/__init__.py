"""The `zoo` command: reads a command line, calls the library, answers in text or JSON.

main            which command, and what becomes of errors and Ctrl-C
models, planning, training_step, comparison    the commands; these files do not know each other
model_spec      which model, and on what inputs
parser, values  strict options with suggestions, and the types of their values
output          files, messages and plain signs
interrupts      Ctrl-C before there is a command
"""
