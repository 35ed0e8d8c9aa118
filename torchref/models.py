"""GRU, LSTM and vanilla RNN language models, with the study's parameter names.

The state is an argument and a result: a list with one tuple per layer, (h,) or, in LSTMs, (h, c).
Letters: B batch, T time, V vocabulary, E embedding, H hidden, L layers; ⊙ elementwise.
"""

import torch
from torch import nn
from torch.nn.functional import dropout


class GRUCell(nn.Module):
    """Applies the reset gate BEFORE the product: h' = (1 − z) ⊙ h + z ⊙ tanh(Wx·x + Wh·(r ⊙ h)).

    bias_z and bias_r are added to the biases of Wzx and Wrx: the study has both.
    """

    num_states = 1

    def __init__(self, E, H, second_bias=True):
        super().__init__()
        self.Wx = nn.Linear(E, H)
        self.Wh = nn.Linear(H, H, bias=False)
        self.Wzx = nn.Linear(E, H)
        self.Wzh = nn.Linear(H, H, bias=False)
        self.Wrx = nn.Linear(E, H)
        self.Wrh = nn.Linear(H, H, bias=False)
        self.bias_z = nn.Parameter(torch.zeros(H)) if second_bias else 0.0
        self.bias_r = nn.Parameter(torch.zeros(H)) if second_bias else 0.0

    def forward(self, x, state):
        (h,) = state
        z = torch.sigmoid(self.Wzx(x) + self.Wzh(h) + self.bias_z)
        r = torch.sigmoid(self.Wrx(x) + self.Wrh(h) + self.bias_r)
        n = torch.tanh(self.Wx(x) + self.Wh(r * h))
        return ((1 - z) * h + z * n,)


class LSTMCell(nn.Module):
    """Forget, input and output gate, candidate g: c' = f ⊙ c + i ⊙ g; h' = o ⊙ tanh(c')."""

    num_states = 2

    def __init__(self, E, H):
        super().__init__()
        for gate in "fiog":
            bias = 1.0 if gate == "f" else 0.0
            setattr(self, f"W_{gate}_x", nn.Linear(E, H, bias=False))
            setattr(self, f"W_{gate}_h", nn.Linear(H, H, bias=False))
            setattr(self, f"b_{gate}", nn.Parameter(torch.full((H,), bias)))

    def forward(self, x, state):
        h, c = state
        f = torch.sigmoid(self.W_f_x(x) + self.W_f_h(h) + self.b_f)
        i = torch.sigmoid(self.W_i_x(x) + self.W_i_h(h) + self.b_i)
        o = torch.sigmoid(self.W_o_x(x) + self.W_o_h(h) + self.b_o)
        g = torch.tanh(self.W_g_x(x) + self.W_g_h(h) + self.b_g)
        c = f * c + i * g
        return o * torch.tanh(c), c


class RNNCell(nn.Module):
    """h' = tanh(Wx·x + Wh·h); Wx has the bias."""

    num_states = 1

    def __init__(self, E, H):
        super().__init__()
        self.Wx = nn.Linear(E, H)
        self.Wh = nn.Linear(H, H, bias=False)

    def forward(self, x, state):
        (h,) = state
        return (torch.tanh(self.Wx(x) + self.Wh(h)),)


def unroll(cell, x, state, mask=None):
    """Apply a cell over time to x (B, T, E). A mask (B, T, H) multiplies h' in the recurrence."""
    outputs = []
    for t in range(x.shape[1]):
        h, *c = cell(x[:, t], state)
        if mask is not None:
            h = h * mask[:, t]
        state = (h, *c)
        outputs.append(h)
    return torch.stack(outputs, dim=1), state


class LanguageModel(nn.Module):
    """Embedding → stacked cells → (LayerNorm) → head; subclasses have the study's names for them.

    Dropout sites: "state", on h' inside the recurrence of every layer; "between", between layers;
    "output", on the last layer's output.
    """

    def __init__(self, H, p, site):
        super().__init__()
        self.hidden_dim = H
        self.dropout = p
        self.site = site

    def forward(self, tokens, carry=None, masks=None):
        """Return logits (B, T, V) and the new carry. masks: (B, T, H) per layer, 0 or 1/(1 − p)."""
        embedding, cells, norm, head = self.parts()
        carry = carry or self.initial_carry(len(tokens))
        if masks is None and self.training and self.dropout > 0:
            ones = embedding.weight.new_ones(*tokens.shape, self.hidden_dim)
            masks = [dropout(ones, self.dropout) for _ in cells]
        x = embedding(tokens)
        new_carry = []
        for i, (cell, state) in enumerate(zip(cells, carry, strict=True)):
            mask = masks[i] if masks else None
            x, state = unroll(cell, x, state, mask if self.site == "state" else None)
            site_after = "output" if i == len(cells) - 1 else "between"
            if mask is not None and self.site == site_after:
                x = x * mask
            new_carry.append(state)
        return head(norm(x)), new_carry

    def initial_carry(self, B):
        embedding, cells, _, _ = self.parts()
        zeros = embedding.weight.new_zeros(B, self.hidden_dim)
        return [(zeros,) * cell.num_states for cell in cells]


class MyGRUModel(LanguageModel):
    """The study's Astra and Scribe."""

    cell = GRUCell
    cell_name = "grucell"

    def __init__(
        self,
        vocab_size,
        embd_dim,
        hidden_dim,
        num_layers=1,
        dropout=0.0,
        site="state",
        **cell_options,
    ):
        super().__init__(hidden_dim, dropout, site)
        inputs = [embd_dim] + [hidden_dim] * (num_layers - 1)
        cells = [self.cell(E, hidden_dim, **cell_options) for E in inputs]
        self.embedding = nn.Embedding(vocab_size, embd_dim)
        self.layers = nn.ModuleList(nn.ModuleDict({self.cell_name: cell}) for cell in cells)
        self.fc = nn.ModuleDict({"linear_projection": nn.Linear(hidden_dim, vocab_size)})

    def parts(self):
        cells = [layer[self.cell_name] for layer in self.layers]
        return self.embedding, cells, nn.Identity(), self.fc["linear_projection"]


class ScribeAsPublished(MyGRUModel):
    """The study's subword model: it takes and returns a state but does not pass it to its layers.

    Its `forward(x, h_prev)` calls `layer(h)`, so its "stateful" samples are stateless
    (Himanshu7921/GenerateMore, notebooks/7_shakespeare_generator_bpe.ipynb).
    """

    def forward(self, tokens, carry=None, masks=None):
        """Return logits (B, T, V) from the zero state, whatever the carry."""
        return super().forward(tokens, None, masks)


class MyRNNModel(MyGRUModel):
    """The vanilla RNN (Elman 1990), in the same style."""

    cell = RNNCell
    cell_name = "rnncell"


class MyLSTMModel(LanguageModel):
    """The study's Leviathan: LayerNorm after dropout, before the head."""

    def __init__(self, vocab_size, in_features, hidden_dim, n_layers=1, dropout=0.0, site="output"):
        super().__init__(hidden_dim, dropout, site)
        inputs = [in_features] + [hidden_dim] * (n_layers - 1)
        self.embeddings = nn.Embedding(vocab_size, in_features)
        cells = nn.ModuleList(LSTMCell(E, hidden_dim) for E in inputs)
        self.lstm_layer = nn.ModuleDict({"layers": cells})
        self.layer_norm = nn.LayerNorm(hidden_dim)
        self.linear_projection = nn.ModuleDict(
            {"linear_projection": nn.Linear(hidden_dim, vocab_size)}
        )

    def parts(self):
        cells = self.lstm_layer["layers"]
        head = self.linear_projection["linear_projection"]
        return self.embeddings, cells, self.layer_norm, head


def load(path):
    """Load the model of one of the study's .pth files, in evaluation mode."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if checkpoint["model_class"] == "MyGRUModel":
        cls = MyGRUModel
        sizes = ["vocab_size", "embd_dim", "hidden_dim", "num_layers", "dropout"]
    else:
        cls = MyLSTMModel
        sizes = ["vocab_size", "in_features", "hidden_dim", "n_layers", "dropout"]
    model = cls(*(checkpoint[name] for name in sizes))
    model.load_state_dict(checkpoint["state_dict"], strict=True)
    return model.eval()
