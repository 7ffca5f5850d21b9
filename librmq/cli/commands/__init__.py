"""The functions of commands: one module for each subject, loaded at the first use of a command."""
