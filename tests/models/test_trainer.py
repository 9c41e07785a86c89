"""`transformers.Trainer` treats the decoder as it treats Llama."""

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(model, tokens, tmp_path, **options):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_eval_batch_size=2,
        **options,
    )
    return Trainer(model, arguments, eval_dataset=Rows(tokens), train_dataset=Rows(tokens))


def test_evaluate_and_predict(make_model, make_tokens, tmp_path):
    model, tokens = make_model("tape"), make_tokens(4, 9)
    run = trainer(model, tokens, tmp_path)
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
        logits = model(tokens).logits
    assert abs(run.evaluate()["eval_loss"] - loss) < 1e-5
    torch.testing.assert_close(torch.from_numpy(run.predict(Rows(tokens)).predictions), logits)


def test_label_smoothing_predicts_the_next_token(make_model, make_tokens, tmp_path):
    model, tokens = make_model("tape"), make_tokens(4, 9)
    run = trainer(model, tokens, tmp_path, label_smoothing_factor=0.1)
    loss = run.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
