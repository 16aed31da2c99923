"""The program: types of values, instructions, their rules and costs."""
