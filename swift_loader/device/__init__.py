"""From the trainer's memory to the device."""
