"""The command line: `swift-loader SUBCOMMAND`, also `python -m swift_loader SUBCOMMAND`."""
