"""A subclass of `Trainer` with a loss of its own, tuned as it is: `trainer_subclass.py` with its last lines changed."""

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hydro_rasda import loguniform
from hydro_rasda.integrations.transformers import tune_trainer

CLASSES, TOKENS = 4, 32


class BalancedTrainer(Trainer):
    """Weighs classes, and adds the squared log-normalizer of the logits to the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean loss of a batch."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2, 4, 8], device=labels.device)
        loss = F.cross_entropy(outputs.logits, labels, weights) + 1e-3 * outputs.logits.logsumexp(1).square().mean()
        return (loss, outputs) if return_outputs else loss


def sequences(count, seed):
    """Return sequences of tokens. Their class depends on the share of even tokens. Some classes are rare."""
    tokens = torch.randint(TOKENS, (count, 16), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens % 2 == 0).sum(1) - 6).div(2, rounding_mode="floor").clamp(0, CLASSES - 1)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels)]


config = BertConfig(
    vocab_size=TOKENS,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_labels=CLASSES,
)
args = TrainingArguments(
    output_dir="runs",
    num_train_epochs=9,
    learning_rate=1e-3,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
result = tune_trainer(
    config,
    args,
    {"learning_rate": loguniform(1e-4, 1e-1), "weight_decay": loguniform(1e-4, 1)},
    model_class=BertForSequenceClassification,
    trainer_class=BalancedTrainer,
    train_dataset=sequences(1024, seed=0),
    eval_dataset=sequences(256, seed=1),
    num_samples=12,
)
print(f"Best learning rate {result.args.learning_rate:.2g}: evaluation loss {result.best_metric:.4f}")
