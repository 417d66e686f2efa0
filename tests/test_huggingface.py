"""Hugging Face models as they come, against a float64 loop over examples."""

import copy
import warnings

import pytest
import torch
from torch import nn

import clipwise as cw
from helpers import row_norms

hf = pytest.importorskip("transformers")
from huggingface import CASES, ROTARY, SMALL, VIT, causal, ids, text  # noqa: E402

SIX = ["gpt2", "bert", "t5", "llama", "vit", "wav2vec2"]
METHODS = ["auto", "reweight", "multiloss", "nxbp"]


@pytest.fixture(autouse=True)
def _quiet():
    hf.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def double(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def by_the_loop(case, model, inputs):
    """{name: (B, …)}: one forward and backward pass an example."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(next(iter(inputs.values())))):
        losses = case.loss(model, {name: value[i : i + 1] for name, value in inputs.items()})
        found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values())])
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows))}


def norms_of(reference):
    return torch.stack([grad.flatten(1).square().sum(1) for grad in reference.values()]).sum(0).sqrt()


IN_FLOAT32 = {"t5", "llama"}  # their norms compute in float32 whatever the model's precision: a second backward pass rounds anew


def assert_exact(case, model, inputs, method, tolerance=1e-8):
    reference = by_the_loop(case, model, inputs)
    norms = norms_of(reference)
    bound = float(norms.median())
    with cw.capture(model) as tape:
        losses = case.loss(model, inputs)
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms, rtol=1e-8, atol=0)
    found = cw.clipped_gradients(tape, losses, cw.flat(bound), method=method)
    expected = {name: torch.einsum("b,b...->...", (bound / norms).clamp(max=1), grad) for name, grad in reference.items()}
    scale = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((found.get(name, torch.zeros_like(value)) - value).norm()) <= tolerance * scale, name


@pytest.mark.parametrize("name", CASES)
def test_models_without_change(name):
    case = CASES[name]
    model = case.build(0.0).double().train()
    assert_exact(case, model, double(case.batch(5)), "auto")
    assert_exact(case, model, double(case.batch(3)), "auto")  # another size, when it is known


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("method", METHODS[1:])
def test_by_every_method(name, method):
    case = CASES[name]
    tolerance = 1e-6 if name in IN_FLOAT32 and method == "reweight" else 1e-8
    assert_exact(case, case.build(0.0).double().train(), double(case.batch(4)), method, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_with_dropout(name):
    """The masks of one run: the reference is one backward pass a loss, through the same graph."""
    case = CASES[name]
    model = case.build(0.2).double().train()
    with cw.capture(model) as tape:
        losses = case.loss(model, double(case.batch(4)))
    norms = cw.per_example_norms(tape, losses)
    trainable = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(loss, trainable, retain_graph=True, allow_unused=True) for loss in losses]
    true = row_norms(rows)
    torch.testing.assert_close(norms, true, rtol=1e-8, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "gemma"])
def test_tied_weights_stay_tied(name):
    model = CASES[name].build(0.0)
    with cw.capture(model) as tape:
        losses = CASES[name].loss(model, CASES[name].batch(3))
    cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_experts_by_grouped_products(family):
    """Their default; PyTorch has it in float32 and below only."""
    options = {
        "Mixtral": {"num_local_experts": 3},
        "Qwen2Moe": {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    }
    config = getattr(hf, f"{family}Config")(**ROTARY, num_experts_per_tok=2, **options[family])
    model = getattr(hf, f"{family}ForCausalLM")(config)
    for batch in (5, 4, 5):
        inputs = text(batch)
        rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True) for loss in causal(model, inputs)]
        norms = row_norms(rows)
        with cw.capture(model) as tape:
            losses = causal(model, inputs)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms, rtol=1e-4, atol=0)


def test_the_scalar_loss_is_refused_with_its_repair():
    model, inputs = CASES["gpt2"].build(0.0), text(4)
    with cw.capture(model) as tape:
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    with pytest.raises(cw.LossShape, match=r"clipwise\.token_losses"):
        cw.clipped_loss(tape, loss, cw.flat(1.0))


def test_contrastive_losses_are_refused():
    config = hf.CLIPConfig(text_config={**SMALL}, vision_config={**VIT}, projection_dim=8)
    model = hf.CLIPModel(config)
    with cw.capture(model) as tape:
        similarity = model(input_ids=ids(4), pixel_values=torch.randn(4, 3, 32, 32)).logits_per_text
        losses = nn.functional.cross_entropy(similarity, torch.arange(4), reduction="none")
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_token_losses_are_hugging_face_s_own_of_one_sequence():
    inputs = text(4)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    gpt, bert = CASES["gpt2"].build(0.0).double(), CASES["bert"].build(0.0).double()
    for model, is_causal in ((gpt, True), (bert, False)):
        losses = cw.token_losses(model(**inputs).logits, labels, causal=is_causal)
        own = [model(**{k: v[i : i + 1] for k, v in inputs.items()}, labels=labels[i : i + 1]).loss for i in range(4)]
        torch.testing.assert_close(losses, torch.stack(own), check_dtype=False, rtol=1e-6, atol=0)  # theirs is computed in float32


def test_gradient_checkpointing_as_hugging_face_does_it():
    case = CASES["llama"]
    model = case.build(0.0).double().train()
    inputs = double(case.batch(4))
    norms = norms_of(by_the_loop(case, model, inputs))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with cw.capture(model) as tape:
        losses = case.loss(model, inputs)
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


# --- adapters


def adapted(config, base="llama"):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(CASES[base].build(0.0), config(peft))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not float(parameter.abs().sum()):
                parameter.normal_(0, 0.1)  # B = 0 at the start would leave A without a gradient to compare
    return model.double().train()


ADAPTERS = {
    "lora": lambda p: p.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
    "lora everywhere, with biases": lambda p: p.LoraConfig(r=2, target_modules="all-linear", bias="all", lora_dropout=0.0),
    "rslora": lambda p: p.LoraConfig(r=3, target_modules=["down_proj"], use_rslora=True),
    "dora": lambda p: p.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "lora of the embedding": lambda p: p.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "ia3": lambda p: p.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda p: p.VeraConfig(r=4, target_modules=["q_proj"]),
    "loha": lambda p: p.LoHaConfig(r=2, alpha=4, target_modules=["q_proj", "v_proj"]),
    "lokr": lambda p: p.LoKrConfig(r=2, alpha=4, target_modules=["q_proj", "v_proj"]),
    "prompt tuning": lambda p: p.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda p: p.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name):
    model = adapted(ADAPTERS[name])
    virtual = 3 if name == "prompt tuning" else 0

    def loss(model, inputs):
        logits = model(**inputs).logits[:, virtual:]
        return cw.token_losses(logits, inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100), causal=True)

    case = copy.replace(CASES["llama"], loss=loss) if hasattr(copy, "replace") else type(CASES["llama"])(None, text, loss)
    assert_exact(case, model, text(4), "auto")


class Quantised(nn.Module):
    """Int8 weights with a scale a row, as quantised bases hold them: no gradient of their own, but one for what came before."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def test_adapters_on_a_quantised_base():
    model = adapted(lambda p: p.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for module in list(model.modules()):
        if hasattr(module, "base_layer"):
            module.base_layer = Quantised(module.base_layer)
    case = CASES["llama"]
    assert_exact(case, model, text(4), "auto")


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_a_base_quantised_by_bitsandbytes(bits):
    bnb = pytest.importorskip("bitsandbytes")

    def quantised():
        kinds = {4: lambda: bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")}
        layer = kinds.get(bits, lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False))()
        layer.load_state_dict(nn.Linear(64, 64).state_dict())
        return layer.to("cpu").requires_grad_(False)

    adapter = lambda: nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))
    model = nn.ModuleList([quantised(), adapter(), quantised(), adapter()])
    forward = lambda x: model[2](h := torch.tanh(model[0](x) + model[1](x))) + model[3](h)
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = forward(torch.randn(8, 5, 64)).square().mean((1, 2))
        norms = cw.per_example_norms(tape, losses)
        rows = [torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True) for loss in losses]
        torch.testing.assert_close(norms, row_norms(rows), rtol=1e-5, atol=0)


def test_lora_as_it_starts():
    """B = 0: the gradient of A is zero on the first step, and right on the second."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(CASES["gpt2"].build(0.0), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).double()
    case = CASES["gpt2"]
    for _ in range(3):
        assert_exact(case, model, text(4), "auto")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))


def test_causal_losses_see_only_their_own_padding():
    """Two batches that differ in padding alone give the same norms."""
    model = CASES["gpt2"].build(0.0).double()
    inputs = text(4)
    longer = {name: nn.functional.pad(value, (0, 3)) for name, value in inputs.items()}
    found = []
    for batch in (inputs, longer):
        with cw.capture(model) as tape:
            losses = causal(model, batch)
        found.append(cw.per_example_norms(tape, losses))
    torch.testing.assert_close(*found)
