package kube

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
)

func TestReviewer(t *testing.T) { synctest.Test(t, testReviewer) }

func testReviewer(t *testing.T) {
	c := newCluster(t)
	asked := 0
	mayRead := map[string]bool{"prometheus": true}
	var down error
	c.core.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		asked++
		review := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		user, ok := map[string]string{"t1": "prometheus", "t2": "stranger"}[review.Spec.Token]
		review.Status = authenticationv1.TokenReviewStatus{
			Authenticated: ok,
			User:          authenticationv1.UserInfo{Username: user},
		}
		return true, review, down
	})
	c.core.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
		at := review.Spec.NonResourceAttributes
		review.Status.Allowed = mayRead[review.Spec.User] && at.Path == "/metrics" && at.Verb == "get"
		return true, review, nil
	})
	r := NewReviewer(c.client, quiet)
	guarded := r.Guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") }))
	want := func(authorization string, status int) {
		t.Helper()
		req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		if authorization != "" {
			req.Header.Set("Authorization", authorization)
		}
		response := httptest.NewRecorder()
		guarded.ServeHTTP(response, req)
		if response.Code != status || (response.Body.String() == "metrics") != (status == http.StatusOK) {
			t.Errorf("%q: %d %s, want %d", authorization, response.Code, response.Body, status)
		}
	}
	want("", http.StatusUnauthorized)
	want("Basic t1", http.StatusUnauthorized)
	want("Bearer ", http.StatusUnauthorized)
	if asked != 0 {
		t.Errorf("%d reviews of requests without a token, want 0", asked)
	}
	want("Bearer t1", http.StatusOK)
	want("Bearer t2", http.StatusForbidden)
	want("Bearer t3", http.StatusUnauthorized)
	if asked != 3 {
		t.Errorf("%d reviews of three tokens", asked)
	}
	// Verdicts are cached, with or without the API server.
	down = apierrors.NewForbidden(schema.GroupResource{Resource: "tokenreviews"}, "", errors.New("no"))
	want("Bearer t1", http.StatusOK)
	want("Bearer t4", http.StatusServiceUnavailable)
	if r.Kind().Health() != Forbidden || r.Kind().Errors() != 1 {
		t.Errorf("%s, %d errors", r.Kind().Health(), r.Kind().Errors())
	}
	down = nil
	mayRead["prometheus"], mayRead["stranger"] = false, true
	<-time.After(refusedFor)
	want("Bearer t1", http.StatusOK)
	want("Bearer t2", http.StatusOK)
	<-time.After(allowedFor)
	want("Bearer t1", http.StatusForbidden)
	for i := range 2 * maxVerdicts { // many tokens must not take unbounded memory
		want(fmt.Sprint("Bearer x", i), http.StatusUnauthorized)
	}
	if n := len(r.verdicts); n > maxVerdicts {
		t.Errorf("%d verdicts are cached", n)
	}
}
