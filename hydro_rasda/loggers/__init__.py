"""Callbacks that write a run down elsewhere: `tune(callbacks=[TensorBoardLogger("tb")])`, on either backend.

Each writes a trial's metrics after each epoch, as "sweep/val_loss" and "full size/val_loss", and its configuration. A
run that goes on appends what is new to what an earlier process wrote.
"""

from hydro_rasda.loggers.csv import CSVLogger
from hydro_rasda.loggers.mlflow import MLflowLogger
from hydro_rasda.loggers.tensorboard import TensorBoardLogger
from hydro_rasda.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
