"""What a checkpoint is: open, read, run one layer, write an export, load it back."""
