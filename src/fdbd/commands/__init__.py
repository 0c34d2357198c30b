"""The commands of the `fdbd` program, one module each. A module imports at its top only what
`--help` needs."""
