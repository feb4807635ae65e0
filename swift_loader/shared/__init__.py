"""What all processes of a machine share: memory without a name, lists in it, and a cache of samples."""
