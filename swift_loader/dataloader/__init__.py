"""The drop-in class: `torch.utils.data.DataLoader` on the scheduler and the executors of this package."""
