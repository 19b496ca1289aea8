package kube

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reviewer asks the API server who may read a page, as Kubernetes' own programs do. A request carries a token of the
// cluster; its bearer must have the right to get the page's path. Create it with NewReviewer.
type Reviewer struct {
	client *Client
	kind   *Kind

	mu       sync.Mutex
	verdicts map[[sha256.Size]byte]verdict // by token and path; guarded by mu
}

type verdict struct {
	status int
	until  time.Time
}

const (
	allowedFor    = time.Minute
	refusedFor    = 10 * time.Second
	maxVerdicts   = 1024 // a bound, because any client can send tokens
	reviewTimeout = 5 * time.Second
)

// NewReviewer returns a reviewer with an empty cache.
func NewReviewer(c *Client, log *slog.Logger) *Reviewer {
	return &Reviewer{client: c, kind: newKind("tokenreviews", log), verdicts: map[[sha256.Size]byte]verdict{}}
}

// Kind returns the health of the reviews.
func (r *Reviewer) Kind() *Kind { return r.kind }

// Guard passes requests whose bearer may get the path. Otherwise it answers 401 (no token, or not a token of the
// cluster), 403 (no such right) or 503 (the API server cannot be asked).
func (r *Reviewer) Guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		token, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		status := http.StatusUnauthorized
		if bearer && token != "" {
			status = r.review(req.Context(), token, req.URL.Path)
		}
		switch status {
		case http.StatusOK:
			next.ServeHTTP(w, req)
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the header \"Authorization: Bearer TOKEN\" must have a token of the cluster "+
				"(--metrics-endpoint-auth)", status)
		case http.StatusForbidden:
			http.Error(w, "the token's bearer has no right to get this path: a ClusterRole with nonResourceURLs: [\""+
				req.URL.Path+"\"], verbs: [get] grants it (--metrics-endpoint-auth)", status)
		default:
			http.Error(w, "kvepp cannot ask the API server who may read this; kvepp's log has the cause "+
				"(--metrics-endpoint-auth)", status)
		}
	})
}

// review returns the status for a token and a path: 200, 401, 403 or 503.
func (r *Reviewer) review(ctx context.Context, token, path string) int {
	key := sha256.Sum256([]byte(path + "\x00" + token))
	now := time.Now()
	r.mu.Lock()
	known, ok := r.verdicts[key]
	r.mu.Unlock()
	if ok && now.Before(known.until) {
		return known.status
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	status, err := r.ask(ctx, token, path)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			r.kind.failed(err)
		}
		return http.StatusServiceUnavailable
	}
	r.kind.followed()
	until := now.Add(refusedFor)
	if status == http.StatusOK {
		until = now.Add(allowedFor)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.verdicts) >= maxVerdicts {
		clear(r.verdicts)
	}
	r.verdicts[key] = verdict{status, until}
	return status
}

func (r *Reviewer) ask(ctx context.Context, token, path string) (int, error) {
	who, err := r.client.reviews.AuthenticationV1().TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return 0, err
	}
	if !who.Status.Authenticated {
		return http.StatusUnauthorized, nil
	}
	user := who.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for key, value := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(value)
	}
	may, err := r.client.reviews.AuthorizationV1().SubjectAccessReviews().Create(
		ctx,
		&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
		}},
		metav1.CreateOptions{},
	)
	if err != nil {
		return 0, err
	}
	if !may.Status.Allowed {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
