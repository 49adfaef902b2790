"""PPO once more: slowly, in NumPy and float64, with gradients by finite differences; shares no code with the library."""

import numpy as np


class OracleStats:
    """Mean and population variance of everything seen, from a list of all of it."""

    def __init__(self, shape):
        self.seen = np.zeros((0, *shape))

    def add(self, rows):
        self.seen = np.concatenate([self.seen, rows])

    @property
    def mean(self):
        return self.seen.mean(0) if len(self.seen) else np.zeros(self.seen.shape[1:])

    @property
    def deviation(self):
        return np.sqrt((self.seen.var(0) if len(self.seen) else np.ones(self.seen.shape[1:])) + 1e-8)


def forward(params, obs, box):
    """A tanh network with separate torsos: `(distribution parameters, value)`."""

    def torso(x, layers):
        for layer in layers.values():
            x = np.tanh(x @ layer["kernel"] + layer["bias"])
        return x

    actor, critic = (torso(obs, params[name]["dense"]["layers"]) for name in ("actor", "critic"))
    out = actor @ params["policy"]["linear"]["kernel"] + params["policy"]["linear"]["bias"]
    value = critic @ params["value"]["kernel"] + params["value"]["bias"]
    return (out, params["policy"]["log_std"]["all"] if box else None), value[..., 0]


def log_prob_and_entropy(dist, action):
    out, log_std = dist
    if log_std is None:
        log_p = out - out.max(-1, keepdims=True)
        log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
        chosen = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
        return chosen, -(np.exp(log_p) * log_p).sum(-1)
    z = (action - out) / np.exp(log_std)
    log_density = -0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)
    return log_density.sum(-1), np.broadcast_to((0.5 * np.log(2 * np.pi * np.e) + log_std).sum(-1), out.shape[:-1])


def advantages(reward, value, terminated, truncated, gamma, lam):
    """GAE by its definition, one environment and one start at a time; rows after an end do not count for it."""
    num_steps, num_envs = reward.shape
    out = np.zeros((num_steps, num_envs))
    for env in range(num_envs):
        for start in range(num_steps):
            weight = 1.0
            for t in range(start, num_steps):
                after = 0.0 if terminated[t, env] else value[t + 1, env]
                out[start, env] += weight * (reward[t, env] + gamma * after - value[t, env])
                weight *= gamma * lam
                if terminated[t, env] or truncated[t, env]:
                    break
    return out


class OraclePPO:
    """The state of a training, moved on by `update(rollout, minibatches)` with rows numbered `t * B + b`."""

    def __init__(self, params, *, box=False, normalize_obs=False, normalize_reward=False, **settings):
        self.params, self.box = params, box
        self.settings = settings
        size = len(flatten(params))
        self.m, self.v, self.count = np.zeros(size), np.zeros(size), 0
        self.obs_stats = OracleStats((3,)) if normalize_obs else None
        self.return_stats = OracleStats(()) if normalize_reward else None
        self.discounted = None
        self.kept, self.divergences = [], []

    def update(self, rollout, minibatches, learning_rate):
        s, steps = self.settings, rollout.time_steps
        valid = ~(steps.terminated | steps.truncated)[:-1]
        obs = np.asarray(steps.obs, np.float64)
        if self.obs_stats is not None:
            obs = np.clip((obs - self.obs_stats.mean) / self.obs_stats.deviation, -10, 10)
        reward = np.asarray(steps.reward, np.float64)[1:]
        if self.return_stats is not None:
            reward = np.clip(reward / self.return_stats.deviation, -10, 10)
        dist, value = forward(self.params, obs, self.box)
        dist = (dist[0][:-1], dist[1])
        old_log_prob, _ = log_prob_and_entropy(dist, np.asarray(rollout.actions))
        advantage = advantages(reward, value, steps.terminated[1:], steps.truncated[1:], s["gamma"], s["gae_lambda"])
        rows = {
            "obs": obs[:-1],
            "action": np.asarray(rollout.actions),
            "old": old_log_prob,
            "value": value[:-1],
            "advantage": advantage,
            "goal": advantage + value[:-1],
            "valid": valid,
        }
        rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}
        self._learn(rows, minibatches, learning_rate)
        self._count(rollout, valid)
        return rows

    def _learn(self, rows, minibatches, learning_rate):
        self.kept, stopped = [], False
        for index in minibatches:
            part = {name: x[index][rows["valid"][index]] for name, x in rows.items()}
            if stopped or not len(part["old"]):
                self.kept.append(False)
                continue
            if self.settings["normalize_advantage"] and len(part["old"]) > 1:
                centred = part["advantage"] - part["advantage"].mean()
                part["advantage"] = centred / (part["advantage"].std() + 1e-8)
            self.divergences.append(self.loss(flatten(self.params), part)["kl"])
            stopped = self.divergences[-1] > 1.5 * self.settings["target_kl"]
            self.kept.append(not stopped)
            if not stopped:
                self._step(part, learning_rate)

    def loss(self, vector, part):
        s = self.settings
        dist, value = forward(unflatten(self.params, vector), part["obs"], self.box)
        log_prob, entropy = log_prob_and_entropy(dist, part["action"])
        ratio = np.exp(log_prob - part["old"])
        clipped = np.clip(ratio, 1 - s["clip_range"], 1 + s["clip_range"])
        policy = -np.minimum(ratio * part["advantage"], clipped * part["advantage"]).mean()
        near = part["value"] + np.clip(value - part["value"], -s["clip_range_vf"], s["clip_range_vf"])
        value_loss = np.maximum((value - part["goal"]) ** 2, (near - part["goal"]) ** 2).mean()
        total = policy + s["vf_coef"] * value_loss - s["ent_coef"] * entropy.mean()
        kl = (ratio - 1 - np.log(ratio)).mean()
        return {"loss": total, "policy": policy, "value": value_loss, "entropy": entropy.mean(), "kl": kl}

    def _step(self, part, learning_rate):
        vector = flatten(self.params)
        gradient = np.zeros_like(vector)
        for i in range(len(vector)):
            step = np.zeros_like(vector)
            step[i] = 1e-6
            up, down = (self.loss(vector + sign * step, part)["loss"] for sign in (1, -1))
            gradient[i] = (up - down) / 2e-6
        norm = np.sqrt((gradient**2).sum())
        gradient = gradient * min(1.0, self.settings["max_grad_norm"] / norm) if norm > 0 else gradient
        self.count += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        direction = (self.m / (1 - 0.9**self.count)) / (np.sqrt(self.v / (1 - 0.999**self.count)) + self.settings["adam_eps"])
        self.params = unflatten(self.params, vector - learning_rate * direction)

    def _count(self, rollout, valid):
        steps = rollout.time_steps
        if self.obs_stats is not None:
            self.obs_stats.add(np.asarray(steps.obs, np.float64)[:-1][valid])
        if self.return_stats is None:
            return
        num_steps, num_envs = valid.shape
        now = np.zeros(num_envs) if self.discounted is None else self.discounted
        for t in range(num_steps):
            for env in range(num_envs):
                if steps.first[t + 1, env]:
                    now[env] = 0.0
                else:
                    now[env] = steps.reward[t + 1, env] + self.settings["gamma"] * now[env]
            self.return_stats.add(now[valid[t]].copy())
        self.discounted = now


def flatten(tree):
    """One vector of a tree's arrays, dicts in the order of their keys."""
    if isinstance(tree, dict):
        return np.concatenate([flatten(tree[name]) for name in sorted(tree)]) if tree else np.zeros(0)
    if isinstance(tree, list | tuple):
        return np.concatenate([flatten(x) for x in tree])
    return np.asarray(tree, np.float64).ravel()


def unflatten(tree, vector):
    """The tree again, from such a vector."""
    return _unflatten(tree, vector, 0)[0]


def _unflatten(tree, vector, start):
    if isinstance(tree, dict):
        out = {}
        for name in sorted(tree):
            out[name], start = _unflatten(tree[name], vector, start)
        return out, start
    if isinstance(tree, list | tuple):
        out = []
        for x in tree:
            x, start = _unflatten(x, vector, start)
            out.append(x)
        return out, start
    size = int(np.size(tree))
    return vector[start : start + size].reshape(np.shape(tree)), start + size
